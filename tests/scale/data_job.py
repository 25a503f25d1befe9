"""A Ray Data job, to be killed: python -m tests.scale.data_job ADDRESS MODEL FOLDER"""

import sys

import ray
from ray.data import SaveMode

from verispec.ray import map_prompts

NUM_PROMPTS = 500
PARAMS = {"max_tokens": 24, "temperature": 1.0}


def prompts() -> list[dict[str, object]]:
    return [{"id": i, "prompt": f"{'abc' * (i % 7)} item {i}"} for i in range(NUM_PROMPTS)]


if __name__ == "__main__":
    address, model, folder = sys.argv[1:]
    ray.init(address=address, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = ray.data.from_items(prompts(), override_num_blocks=25)
    answered = map_prompts(
        rows, model=model, params=PARAMS, id_column="id", batch_size=10, cpus=0.1, actors=2,
        llm={"threads": 1, "drafter": "ngram"}, journal=f"{folder}/journal",
    )  # fmt: skip
    answered.write_json(f"{folder}/out", mode=SaveMode.OVERWRITE)  # a job before may have written some
