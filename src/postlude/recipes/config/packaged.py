"""Configs that are installed with Postlude: `postlude grpo demo` reads configs/demo.yaml of the package."""

from __future__ import annotations

from pathlib import Path

DIRECTORY = Path(__file__).parents[2] / "configs"


def config_names(recipe: str = "") -> list[str]:
    """Returns the names of the packaged configs, such as "demo" and "models/qwen3-8b-sft-8gpus".

    With `recipe`, those of this recipe: the comment of a config has its command, such as `postlude grpo demo`.
    """
    files = [*DIRECTORY.glob("*.yaml"), *(DIRECTORY / "models").glob("*.yaml")]
    names = sorted(str(file.relative_to(DIRECTORY).with_suffix("")) for file in files)
    return [name for name in names if f"postlude {recipe} {name}" in _text(name)] if recipe else names


def _text(name: str) -> str:
    return (DIRECTORY / f"{name}.yaml").read_text("utf-8")


def find_packaged(path: Path, suffix: str = "") -> Path:
    """Returns the packaged file at `path` plus `suffix`, or `path` if it exists or there is no such packaged file."""
    packaged = DIRECTORY / f"{path}{suffix}"
    inside = not path.is_absolute() and ".." not in path.parts
    return packaged if inside and not path.exists() and packaged.is_file() else path


def find_config(path: Path) -> Path:
    """Returns the path of a config file, which may be the name of a packaged one."""
    return find_packaged(path, ".yaml")
