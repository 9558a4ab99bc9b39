"""What docs/measurements.md claims of predictions, as bounds for tests of them.

A short run of a test adds to an error what repeats of one run differ by, which the same page says.
"""
import os
import re

STOLEN_PERCENT = 10  # more stolen, and a run is not sound, whoever looks at it
TRIES = 3            # of a run, until one is sound


def _section(name):
    path = os.path.join(os.environ["WEFT_SOURCE_DIR"], "docs", "measurements.md")
    with open(path) as file:
        text = file.read()
    found = re.search(rf"<!-- {name} -->\n(.*?)(?=\n<!-- |\Z)", text, re.S)
    assert found, f"docs/measurements.md has no section {name}"
    return found.group(1)


def _column(section, heading):
    """The numbers of a column of the section's first table, whatever their units."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")]
            for line in section.splitlines() if line.startswith("|")]
    at = rows[0].index(heading)
    return [abs(float(re.search(r"-?\+?[\d.]+", row[at]).group(0))) for row in rows[2:]]


def prediction_bound():
    """Percent by which the time of another plan may be missed."""
    return max(_column(_section("loop"), "error")) + max(_column(_section("repeats"), "spread"))


def self_replay_bound():
    """Percent by which a recorded run of one lane may be missed when it is replayed."""
    rows = _section("repeats")
    assert "ddp" in rows
    return max(_column(_section("loop"), "self-replay")) + _column(rows, "spread")[0]


def is_sound(answer):
    return answer["sound"] and answer["steal_percent"] <= STOLEN_PERCENT


def unsound(answer):
    """Why an answer says nothing about accuracy, for the message of a skip."""
    return (f"no sound run in {TRIES} tries: processors {answer['cpu_busy_percent']:.0f} % busy, "
            f"{answer['steal_percent']:.0f} % stolen")
