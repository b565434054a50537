"""How far are predictions from what others have published? Every row of ``published.csv``, planned; nothing is run."""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import finish, machine, print_table
from published_record import answer, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="rows whose id contains this")
    parser.add_argument("--output", type=Path, help="keep the result here")
    options = parser.parse_args()
    table, result = [], {}
    for row in rows():
        if options.only and options.only not in row["id"]:
            continue
        found, published = answer(row), float(row["tokens_per_s"])
        error, inside = found.tokens_per_s / published - 1, found.low <= published <= found.high
        table.append(
            (
                row["id"],
                f"{published:,.0f}",
                f"{found.tokens_per_s:,.0f}",
                f"{error:+.1%}",
                f"{found.low:,.0f} to {found.high:,.0f}",
                "inside" if inside else "outside",
                found.rounds,
            )
        )
        result[row["id"]] = {
            "published": published,
            "predicted": found.tokens_per_s,
            "error": error,
            "interval": [found.low, found.high],
            "inside": inside,
            "rounds": found.rounds,
            "kind": row["kind"],
        }
    print_table(
        ("row", "published", "predicted", "error", "interval", "", "rounds"), table, "Tokens per second"
    )
    summary = summed(list(result.values()))
    by_kind = {
        kind: summed([row for row in result.values() if row["kind"] == kind])
        for kind in dict.fromkeys(row["kind"] for row in result.values())
    }
    print_table(
        ("kind", "rows", "median error", "worst", "inside", "interval"),
        [
            (kind, *(f"{value:.1%}" if isinstance(value, float) else str(value) for value in each.values()))
            for kind, each in {**by_kind, "all": summary}.items()
        ],
        "By kind",
    )
    finish(
        {"bench": "published", **summary, "kinds": by_kind, "rows": result, "machine": machine()},
        options.output,
    )


def summed(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return how far off some rows are, and how wide their intervals to either side."""
    errors = sorted(abs(row["error"]) for row in rows)
    return {
        "num_rows": len(rows),
        "median_error": statistics.median(errors),
        "worst_error": errors[-1],
        "inside": sum(row["inside"] for row in rows) / len(rows),
        "median_interval": statistics.median(row["interval"][1] / row["predicted"] - 1 for row in rows),
    }


if __name__ == "__main__":
    main()
