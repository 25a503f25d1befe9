"""A Ray Data job, to be killed: python -m tests.scale.data_job ADDRESS MODEL FOLDER journal|checkpoint whole|part"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.data import SaveMode
from ray.data.checkpoint import CheckpointConfig

from verispec.ray import data, map_prompts

NUM_PROMPTS = 500
NUM_FILES = 25
PART = 10  # batches that each of two actors answers of a job that is to be killed: two fifths of all
PARAMS = {"max_tokens": 24, "temperature": 1.0}


def prompts() -> list[dict[str, object]]:
    return [{"id": i, "prompt": f"{'abc' * (i % 7)} item {i}"} for i in range(NUM_PROMPTS)]


def write_prompts(folder: Path) -> None:
    folder.mkdir()
    for number in range(NUM_FILES):
        lines = map(json.dumps, prompts()[number::NUM_FILES])
        (folder / f"{number}.json").write_text("\n".join(lines))


class Halting(data.Answerer):
    """Answers a part, and then waits to be killed: however quick it is, it never comes to the end."""

    num_answered = 0

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        while self.num_answered == PART:
            time.sleep(0.1)
        self.num_answered += 1
        return super().__call__(batch)


if __name__ == "__main__":
    address, model, folder, keeper, extent = sys.argv[1:]
    ray.init(address=address, log_to_driver=False)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    if keeper == "checkpoint":
        context.checkpoint_config = CheckpointConfig(
            id_column="id", checkpoint_path=f"{folder}/checkpoint", delete_checkpoint_on_success=False
        )
    if extent == "part":
        data.Answerer = Halting  # type: ignore[misc]
    answered = map_prompts(
        ray.data.read_json(f"{folder}/in"), model=model, params=PARAMS, id_column="id", batch_size=10, cpus=0.1,
        actors=2, llm={"threads": 1, "drafter": "ngram"}, journal=f"{folder}/journal" if keeper == "journal" else None,
    )  # fmt: skip
    # A job before may have written some: all of them come again out of a journal, only the others with a checkpoint.
    answered.write_json(f"{folder}/out", mode=SaveMode.OVERWRITE if keeper == "journal" else SaveMode.APPEND)
