"""Say in one message what a run on a GPU lacks: packages, or a device that torch sees. Exit status 1 if anything.

python bench/gpu/check_packages.py --names    # prints what could be installed, torch excepted, and nothing else
"""

import argparse
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
    "xxhash": "xxhash",
    "zstandard": "zstandard",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "hypothesis": "hypothesis",
}
# What is measured more exactly with: clocks and link widths.
HELPFUL = {"pynvml": "nvidia-ml-py"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", action="store_true", help="print names of missing packages alone")
    parser.add_argument("--device", default="cuda", help="that is asked for")
    args = parser.parse_args()
    missing = missing_of(NEEDED)
    if args.names:
        print(" ".join(name for name in [*missing, *missing_of(HELPFUL)] if name != "torch"))
        return 0
    if missing:
        print(f"missing packages for Python {sys.version.split()[0]}: {' '.join(missing)}", file=sys.stderr)
        return 1
    import torch
    import transformers

    if not args.device.startswith("cuda"):
        print(f"{args.device}, no GPU: torch {torch.__version__}, transformers {transformers.__version__}")
        return 0
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no CUDA device", file=sys.stderr)
        return 1
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {sys.version.split()[0]}"
    )
    return 0


def missing_of(packages: dict[str, str]) -> list[str]:
    return [name for module, name in packages.items() if importlib.util.find_spec(module) is None]


if __name__ == "__main__":
    sys.exit(main())
