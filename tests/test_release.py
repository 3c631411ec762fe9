"""What a release consists of agrees with pyproject.toml: the page of installation, locked versions, workflows."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTALL = (ROOT / "docs" / "install.md").read_text()
DEVELOPMENT = {"test", "benchmark", "docs", "lint", "dev"}


def names_in_table(heading: str) -> list[str]:
    """Returns the names in the first column of the table below a heading of docs/install.md."""
    section = INSTALL.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    cells = re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)]


def test_the_page_of_installation_has_every_dependency_once() -> None:
    dependencies = [Requirement(line).name for line in PROJECT["dependencies"]]
    assert sorted(names_in_table("What is installed")) == sorted(dependencies)


def test_the_page_of_installation_has_every_extra_of_users_once() -> None:
    assert sorted(names_in_table("Extras")) == sorted(set(PROJECT["optional-dependencies"]) - DEVELOPMENT)


def test_make_targets_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob(".github/**/*.yml"), *ROOT.glob("docker/*")):
        named = set(re.findall(r"(?:`|run: )make (?:[A-Z]+=\S+ )*([a-z][\w-]+)", page.read_text()))
        assert named <= targets, page


# --- locked versions


def locked(name: str) -> dict[str, list[tuple[str, str, int]]]:
    """Returns the versions of each package in a file of locked versions, with their markers and number of hashes."""
    versions: dict[str, list[tuple[str, str, int]]] = {}
    for entry in re.split(r"\n(?=\w)", re.sub(r"^#.*\n", "", (ROOT / name).read_text(), flags=re.MULTILINE)):
        line, *hashes = entry.replace("\\\n", "").split("--hash=sha256:")
        requirement, _, marker = line.partition(";")
        package, _, version = requirement.strip().partition("==")
        versions.setdefault(canonicalize_name(package), []).append((version, marker.strip(), len(hashes)))
    return versions


def direct_requirements(extra: str) -> Iterator[Requirement]:
    """Yields what an extra needs itself, through extras of the project too."""
    for line in PROJECT["optional-dependencies"][extra]:
        requirement = Requirement(line)
        if requirement.name == "postlude":
            for inner in requirement.extras:
                yield from direct_requirements(inner)
        else:
            yield requirement


MACHINES = [
    {"python_version": version, "python_full_version": f"{version}.4", "platform_machine": machine}
    for version in ("3.11", "3.12")
    for machine in ("x86_64", "aarch64")
]


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: " ".join(machine.values()))
def test_locked_versions_of_development_are_those_that_the_project_takes(machine: dict[str, str]) -> None:
    versions = locked("requirements-dev.txt")
    environment = machine | {"sys_platform": "linux", "platform_system": "Linux"}
    for requirement in (*map(Requirement, PROJECT["dependencies"]), *direct_requirements("dev")):
        lines = versions.get(canonicalize_name(requirement.name), [])
        chosen = [version for version, marker, _ in lines if not marker or Marker(marker).evaluate(environment)]
        assert len(chosen) == 1, f"{requirement.name}: run `make lock`"
        assert requirement.specifier.contains(chosen[0]), f"{requirement} but {chosen[0]}: run `make lock`"


@pytest.mark.parametrize("name", ["requirements-dev.txt", "requirements-release.txt"])
def test_locked_versions_have_hashes_and_name_no_host(name: str) -> None:
    assert "://" not in (ROOT / name).read_text()
    versions = locked(name)
    assert len(versions) > 20
    assert not [
        package for package, lines in versions.items() if not all(version and count for version, _, count in lines)
    ]


# --- workflows, and the other files of the repository's host

WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}
JOBS = {f"{name}/{key}": job for name, workflow in WORKFLOWS.items() for key, job in workflow["jobs"].items()}


def test_workflows_have_the_least_rights() -> None:
    """No job has rights that it does not name, and only the one that publishes may do more than read."""
    assert all(workflow["permissions"] == {} for workflow in WORKFLOWS.values())
    for name, job in JOBS.items():
        least = {"id-token": "write"} if name == "release/publish" else {"contents": "read"}
        assert job["permissions"] == least, name
        assert job["timeout-minutes"] <= 60
        checkouts = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")]
        assert all(step["with"] == {"persist-credentials": False} for step in checkouts)
        scripts = [step["run"] for step in job["steps"] if "run" in step]
        assert not [script for script in scripts if "${{" in script], "text of an event would become code"
    assert JOBS["release/publish"]["environment"] == "pypi"
    assert not [step for step in JOBS["release/publish"]["steps"] if "run" in step]


def test_actions_are_pinned_by_hash_with_their_version() -> None:
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        uses = re.findall(r"uses: (.*)$", path.read_text(), re.MULTILINE)
        assert len(uses) == sum(len(job["steps"]) for name, job in JOBS.items() if name.startswith(path.stem)) - sum(
            "run" in step for name, job in JOBS.items() if name.startswith(path.stem) for step in job["steps"]
        )
        for use in uses:
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", use), use


def test_ci_tests_both_machines_and_both_pythons() -> None:
    tested = {
        (entry["machine"].endswith("-arm"), entry["python"])
        for entry in JOBS["ci/test"]["strategy"]["matrix"]["include"]
    }
    assert {arm for arm, _ in tested} == {True, False}
    supported = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)}
    assert {python for _, python in tested} == supported


def test_code_owners_name_paths_that_exist() -> None:
    lines = [line for line in (ROOT / ".github/CODEOWNERS").read_text().splitlines() if line and line[0] != "#"]
    assert lines[0].startswith("* @")
    for path in (line.split()[0] for line in lines[1:]):
        assert (ROOT / path.strip("/")).exists(), path


def test_issue_forms_ask_for_what_the_documentation_says() -> None:
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")}
    assert forms.pop("config") == {"blank_issues_enabled": False}
    for form in forms.values():
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert form["name"]
        assert form["description"]
        assert len({field["id"] for field in fields}) == len(fields) > 0
        assert all(field["attributes"]["label"] for field in fields)
    assert "postlude env" in str(forms["bug"])


def test_the_image_runs_as_a_user_and_has_the_wheel_beside_vllm() -> None:
    text = (ROOT / "docker/Dockerfile").read_text()
    instructions = re.findall(r"^([A-Z]+) (.*(?:\\\n.*)*)", text, re.MULTILINE)
    assert [value for name, value in instructions if name == "USER"] == ["10001"]
    assert [value for name, value in instructions if name == "ENTRYPOINT"] == ['["postlude"]']
    arguments = dict(value.split("=", 1) for name, value in instructions if name == "ARG")
    assert set(arguments["EXTRAS"].split(",")) <= set(PROJECT["optional-dependencies"]) - DEVELOPMENT
    environments = re.findall(r"python3 -m venv (\S+)", text)
    assert environments == ["/opt/vllm", "/opt/postlude"]
    assert "VLLM_PYTHON=/opt/vllm/bin/python" in text
