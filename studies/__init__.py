"""Studies: arms and seeds of a question side by side, with results.jsonl and a page of verdicts."""
