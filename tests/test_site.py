"""Pages link to files that are there, and mkdocs.yml names every page. .ci/run builds the site and checks headings."""

import pathlib
import re

import pytest
import yaml


ROOT = pathlib.Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, in which one tag names a function of Python."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def test_links_lead_to_files():
    links = []
    for page in [*ROOT.glob("*.md"), *DOCS, ROOT / "tests/README.md", ROOT / "benchmarks/README.md"]:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        links += [(page, link) for link in re.findall(r"\]\((?!\w+:|#)([^)#\s]+)[^)]*\)", text)]
    assert len(links) > 300
    assert not [f"{page}: {link}" for page, link in links if not (page.parent / link).exists()]


OTHERS = ("README", "coming-from", "explanations", "families", "glossary", "news", "step")
FEATURES = sorted(
    {page for page in DOCS if page.parent == ROOT / "docs"} - {ROOT / f"docs/{name}.md" for name in OTHERS}
)


@pytest.mark.parametrize("page", FEATURES, ids=lambda page: page.stem)
def test_a_feature_ends_with_limits_and_proofs(page):
    """The last two sections of a feature's page are its limits and its proofs, which name tests that are there."""
    *_, limits, proof = re.split(r"^#+ ", page.read_text(), flags=re.MULTILINE)
    assert limits.startswith("Limits\n") and len(limits) > 60
    assert proof.startswith("How it is proved\n")
    files = set(re.findall(r"`(tests/[\w/]+\.py)", proof))
    modules = re.findall(r"`python -m (tests\.[\w.]+)", proof)
    files |= {f"{name.replace('.', '/')}.py" for name in modules}
    there = [file for file in files if (ROOT / file).exists() or (ROOT / file.removesuffix(".py")).is_dir()]
    assert files and len(there) == len(files), files.difference(there)


def test_every_page_is_in_the_navigation():
    def pages(nav):
        for entry in nav:
            for value in entry.values() if isinstance(entry, dict) else [entry]:
                yield from pages(value) if isinstance(value, list) else [value]

    site = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
    named = {"docs/README.md" if page == "questions.md" else f"docs/{page}" for page in pages(site["nav"])}
    missing = {str(page.relative_to(ROOT)) for page in DOCS} - named
    assert all(page.startswith("docs/models/") for page in missing)  # docs/hooks.py adds the families' pages
