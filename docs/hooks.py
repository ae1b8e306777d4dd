"""Makes the site of what lies in the repository. mkdocs calls the functions that begin with `on_`.

Pages link to files, as they do on any host of the repository. On the site a file outside of docs/ becomes a page of its
own if a page links to it: a Markdown file as it is, a notebook with its outputs, other code in a fence, a folder as a
list. The README is the first page.
"""

import ast
import json
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page


ROOT = pathlib.Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]*)((?:#[^)\s]*)?)(?=\))")
FENCE = re.compile(r"^(`{3,}|~~~).*?^\1\s*$", re.DOTALL | re.MULTILINE)
LANGUAGES = {
    ".py": "python", ".json": "json", ".jinja": "jinja", ".sh": "bash", ".sbatch": "bash", ".toml": "toml",
    ".yaml": "yaml", ".cuda": "docker", ".tpu": "docker",
}  # fmt: skip
WRITTEN = (".md", ".ipynb")  # files with text and links
# Page of the reference -> its modules.
REFERENCE = {
    "zoo": "zoo zoo.load zoo.source zoo.registry zoo.surgery zoo.activations zoo.quantized zoo.lora zoo.mesh "
    "zoo.evaluation zoo.retrieval zoo.verify",
    "zoo.nn": "zoo.nn.model zoo.nn.layers zoo.nn.block zoo.nn.stack zoo.nn.cache zoo.nn.rope zoo.nn.moe zoo.nn.heads",
    "zoo.generation": "zoo.generation.generate zoo.generation.complete zoo.generation.engine zoo.generation.sampling "
    "zoo.generation.speculative zoo.generation.constraints",
    "zoo.text": "zoo.text.tokenizer zoo.text.prompts zoo.weights.peft",
    "kernels": "kernels.attention kernels.decode_attention kernels.ragged_dot kernels.sort_rows kernels.delta_rule "
    "kernels.delta_step kernels.quantized_matmul kernels.cross_entropy kernels.causal_conv kernels.masks "
    "kernels.tokens kernels.mesh kernels.dispatch",
    "convert": "convert.hub convert.files convert.tensors convert.dequantize",
    "train": "train.step.step train.step.loss train.step.task train.state.state train.state.optim train.data.packing "
    "train.data.sets train.run.loop",
}


def site_path(path: str) -> str:
    """Returns the site's page of a file of the repository; both are relative to their roots."""
    if path in ("README.md", "docs/README.md"):
        return "index.md" if path == "README.md" else "questions.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"source/{path}/index.md"
    return f"source/{path.removesuffix('.md').replace('README', 'about')}.md"


def links(markdown: str, path: str) -> Iterator[str]:
    """Yields the files and folders of the repository to which a file links."""
    for target, _ in LINK.findall(FENCE.sub("", markdown)):
        found = os.path.normpath(os.path.join(os.path.dirname(path), target))
        if target and (ROOT / found).exists():
            yield found


def rewritten(markdown: str, path: str) -> str:
    """Returns a file's text with links to pages of the site."""
    here = os.path.dirname(site_path(path))

    def link(match: re.Match) -> str:
        target, anchor = match.groups()
        found = os.path.normpath(os.path.join(os.path.dirname(path), target))
        if not target or not (ROOT / found).exists():
            return match[0]  # strict mode reports it
        return os.path.relpath(site_path(found), here or ".") + anchor

    text, end = [], 0
    for fence in FENCE.finditer(markdown):
        text += [LINK.sub(link, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*text, LINK.sub(link, markdown[end:])])


def content(path: str) -> str:
    """Returns the Markdown of a page about a file or a folder of the repository."""
    file = ROOT / path
    if file.is_dir():
        inside = sorted(
            each for each in file.iterdir() if not each.name.startswith((".", "_")) and each.suffix != ".pyc"
        )
        return "\n".join([f"# {path}/", "", *(f"- `{each.name}`{about(each)}" for each in inside)])
    text = file.read_text()
    if file.suffix == ".ipynb":
        return notebook(json.loads(text))
    return text if file.suffix == ".md" else f"# {path}\n\n{fenced(text, LANGUAGES.get(file.suffix, 'text'))}\n"


def fenced(text: str, language: str) -> str:
    """Returns a text in a fence that is longer than those in it."""
    fence = "`" * max(3, *(len(ticks) + 1 for ticks in re.findall("`{3,}", text)), 3)
    return f"{fence}{language}\n{text}\n{fence}"


def notebook(content: dict[str, Any]) -> str:
    """Returns a notebook as Markdown: its text, and its code and outputs in fences."""
    parts = []
    for cell in content["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else fenced(text, "python"))
        parts += [fenced("".join(output["text"]), "text") for output in cell.get("outputs", ())]
    return "\n\n".join(parts) + "\n"


def about(file: pathlib.Path) -> str:
    """Returns the first line of a module's docstring, after a colon; "" if there is none."""
    doc = ast.get_docstring(ast.parse(file.read_text())) if file.suffix == ".py" else None
    return ": " + doc.splitlines()[0] if doc else ""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lists the families' pages in the navigation, where mkdocs.yml has their index."""
    pages = sorted(f"models/{path.name}" for path in (ROOT / "docs/models").glob("*.md") if path.name != "README.md")
    for section in config.nav or []:
        if "Models" in section:
            section["Models"] += pages
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the README, the files that pages link to, and the reference."""
    files.remove(next(file for file in files if file.src_uri == "README.md"))
    found = ["README.md", "docs/README.md"]
    queue = [*found, *(f"docs/{file.src_uri}" for file in files if file.src_uri.endswith(".md"))]
    for path in queue:
        if path.endswith(WRITTEN) or (ROOT / path).is_dir():
            new = [each for each in dict.fromkeys(links(content(path), path)) if each not in queue]
            queue += new
            found += [each for each in new if not each.startswith("docs/")]
    for path in found:
        files.append(File.generated(config, site_path(path), content=f"<!-- {path} -->\n{content(path)}"))
    for name, modules in REFERENCE.items():
        sections = "\n\n".join(f"::: {module}" for module in modules.split())
        files.append(File.generated(config, f"reference/{name}.md", content=f"# {name}\n\n{sections}\n"))
    files.append(File.generated(config, "reference/errors.md", content=errors()))
    return files


def errors() -> str:
    """Returns the page of all sentences with which the code refuses something, by file."""
    out = [
        "# Error messages",
        "",
        "Every sentence with which the code refuses something, by the file that raises it. A",
    ]
    out[-1] += " `…` stands for a name, a number or a reason. Each message says what to do. The search finds them."
    for package in ("zoo", "kernels", "convert", "train"):
        out += ["", f"## {package}"]
        for file in sorted((ROOT / package).rglob("*.py")):
            raised = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Raise)]
            said = [sentence(node.exc.args[0]) for node in raised if isinstance(node.exc, ast.Call) and node.exc.args]
            if sentences := sorted({text for text in said if len(re.findall(r"\w{2,}", text)) > 3}):
                out += ["", f"### {file.relative_to(ROOT)}", "", *(f"- {text}" for text in sentences)]
    return "\n".join(out) + "\n"


def sentence(node: ast.expr) -> str:
    """Returns the text of a message as Markdown, with … for its values; "" if it is no text."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", " ".join(text.split())) if parts != [node] or text != "…" else ""


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites the links of a page."""
    generated = re.match(r"<!-- (\S+) -->\n", markdown)
    if generated:
        text = rewritten(markdown.removeprefix(generated[0]), generated[1])
    else:
        text = rewritten(markdown, f"docs/{page.file.src_uri}")
    return text.replace("<details>", "<details markdown>")


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Keeps the pages of the navigation for `on_post_build`."""
    config.extra["pages"] = [page for page in nav.pages if not page.file.src_uri.startswith("source/")]
    return nav


def on_post_build(config: MkDocsConfig) -> None:
    """Writes llms.txt, the list of pages for language models (https://llmstxt.org)."""
    pages = [f"- [{page.title}]({page.file.dest_uri})" for page in config.extra["pages"]]
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", "", *pages, ""]
    (pathlib.Path(config.site_dir) / "llms.txt").write_text("\n".join(lines))
