"""Say in one message what a run on a GPU lacks: packages, or a device that torch sees. Exit status 1 if anything."""

import importlib.util
import sys

# Import name → name to install it by.
NEEDED = {
    "torch": "torch",
    "transformers": "transformers",
    "tokenizers": "tokenizers",
    "safetensors": "safetensors",
    "huggingface_hub": "huggingface_hub",
    "accelerate": "accelerate",
    "greenlet": "greenlet",
    "numpy": "numpy",
    "pydantic": "pydantic",
    "pydantic_core": "pydantic_core",
    "annotated_types": "annotated-types",
    "typing_inspection": "typing-inspection",
    "yaml": "PyYAML",
    "typer": "typer",
    "rich": "rich",
    "psutil": "psutil",
    "zstandard": "zstandard",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "hypothesis": "hypothesis",
}


def main() -> int:
    missing = [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(f"missing packages for Python {sys.version.split()[0]}: {' '.join(missing)}", file=sys.stderr)
        return 1
    import torch
    import transformers

    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no CUDA device", file=sys.stderr)
        return 1
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {sys.version.split()[0]}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
