"""Hook of MkDocs: README.md's text is quoted on pages, and its links to docs/images work there too."""

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for image in [file for file in files if file.src_uri.startswith("images/")]:
        files.append(File.generated(config, f"docs/{image.src_uri}", abs_src_path=image.abs_src_path))
    return files
