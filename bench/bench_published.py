"""How far are predictions from what others have published? Every row of ``published.csv``, planned; nothing is run."""

import argparse
import statistics
from pathlib import Path

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
        }
    print_table(
        ("row", "published", "predicted", "error", "interval", "", "rounds"), table, "Tokens per second"
    )
    errors = sorted(abs(row["error"]) for row in result.values())
    summary = {
        "median_error": statistics.median(errors),
        "worst_error": errors[-1],
        "inside": sum(row["inside"] for row in result.values()) / len(result),
    }
    print(
        f"median {summary['median_error']:.1%}, worst {summary['worst_error']:.1%}, inside {summary['inside']:.0%}"
    )
    finish({"bench": "published", **summary, "rows": result, "machine": machine()}, options.output)


if __name__ == "__main__":
    main()
