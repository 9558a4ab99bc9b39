"""What docs/measurements.md claims of predictions, as bounds for tests of them.

A short run of a test adds to an error what repeats of one run differ by, which the same page says.
"""
import os
import re

ROOT = os.environ.get("WEFT_SOURCE_DIR") or os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

STOLEN_PERCENT = 10  # more stolen, and a run is not sound, whoever looks at it
TRIES = 3            # of a run, until one is sound


def section(name):
    path = os.path.join(ROOT, "docs", "measurements.md")
    with open(path) as file:
        text = file.read()
    found = re.search(rf"<!-- {name} -->\n(.*?)(?=\n<!-- |\Z)", text, re.S)
    assert found, f"docs/measurements.md has no section {name}"
    return found.group(1)


def rows(text):
    """Of the first table of a text, each as column -> cell."""
    table = re.search(r"(?:^\|.*\n?)+", text, re.M).group(0)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [dict(zip(cells[0], row)) for row in cells[2:]]


def number(cell):
    return float(re.search(r"[-+]?[\d.]+", cell).group(0))


def _column(text, heading):
    return [abs(number(row[heading])) for row in rows(text)]


def repeat_spread():
    """Percent by which repeats of one run differ."""
    return max(_column(section("repeats"), "spread"))


def prediction_bound():
    """Percent by which the time of another plan may be missed."""
    return max(_column(section("loop"), "error")) + repeat_spread()


def self_replay_bound():
    """Percent by which a recorded run of one lane may be missed when it is replayed."""
    repeats = next(row for row in rows(section("repeats")) if row["model, plan"].endswith("ddp"))
    return max(_column(section("loop"), "self-replay")) + number(repeats["spread"])


def is_sound(answer):
    return answer["sound"] and answer["steal_percent"] <= STOLEN_PERCENT


def unsound(answer):
    """Why an answer says nothing about accuracy, for the message of a skip."""
    return (f"no sound run in {TRIES} tries: processors {answer['cpu_busy_percent']:.0f} % busy, "
            f"{answer['steal_percent']:.0f} % stolen")
