"""Questions asked of many runs: arms and seeds side by side, results.jsonl, and a page with the verdict."""
