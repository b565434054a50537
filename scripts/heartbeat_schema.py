"""Write docs/heartbeat.schema.json and the table in docs/run-directory.md: ``heartbeat_schema.py [--check]``."""

import json
import sys
from pathlib import Path

from outsize.telemetry.run_reading import GpuSample, HostSample, Line, Part

DOCS = Path(__file__).parent.parent / "docs"
SCHEMA, PAGE = DOCS / "heartbeat.schema.json", DOCS / "run-directory.md"
DRAFT = "https://json-schema.org/draft/2020-12/schema"
BEGIN, END = "<!-- Written by `make docs` from src/outsize/telemetry/run_reading.py. -->", "<!-- end -->"


def table(model: type[Part]) -> str:
    """Return the fields of a model as a table."""
    rows = [
        f"| `{field.alias or name}` | {field.description} |" for name, field in model.model_fields.items()
    ]
    return "\n".join(["| field | unit and meaning |", "|---|---|", *rows])


def page() -> str:
    """Return the whole page with its tables written anew."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    parts = {"each GPU in `gpus`": GpuSample, "the host in `host`": HostSample}
    tables = "\n\n".join([table(Line), *(f"Of {name}:\n\n{table(model)}" for name, model in parts.items())])
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def main() -> int:
    """Write both files, or say whether they are as they should be."""
    wanted = {
        SCHEMA: json.dumps({"$schema": DRAFT, **Line.model_json_schema(by_alias=True)}, indent=1) + "\n",
        PAGE: page(),
    }
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        sys.stderr.writelines(f"{path.name} is not what the schema says: run `make docs`\n" for path in stale)
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
