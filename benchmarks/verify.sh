#!/usr/bin/env bash
# The grid of `spot verify` behind the README's figures: about half an hour on two quiet cores. At T = 0 the published chain is the coupled one.
set -euo pipefail
cd "$(dirname "$0")/.."
rules="--rule standard --rule bfloat16 --json"

run() {  # name, then the arguments of `spot verify`; the last line of stdout is the document
    local name=$1
    shift
    # shellcheck disable=SC2086
    .venv/bin/spot verify $rules "$@" | tail -n 1 > "results/$name.json.partial"
    mv "results/$name.json.partial" "results/$name.json"
}

human_eval() {
    run verify-humaneval-T0 --task humaneval --limit 164 --max-new-tokens 16 --nodes 2 --nodes 4 --nodes 8 --nodes 16 --temperature 0 --drafter chain --drafter ltr
    run verify-humaneval-T1 --task humaneval --limit 40 --max-new-tokens 16 --nodes 2 --nodes 8 --temperature 1 --drafter all
}

families() {
    run verify-families-T0 --limit 50 --max-new-tokens 64 --nodes 8 --nodes 4 --temperature 0 --drafter chain --drafter ltr
    run verify-families-T1 --limit 25 --max-new-tokens 64 --nodes 8 --nodes 4 --temperature 1 --drafter all
    run verify-budgets-T0 --limit 6 --max-new-tokens 64 --nodes 2 --nodes 16 --temperature 0 --drafter chain --drafter ltr
    run verify-budgets-T1 --limit 6 --max-new-tokens 64 --nodes 2 --nodes 16 --temperature 1 --drafter all
}

learned() {
    local tasks="--task json --task python --task arithmetic --task rewrite --task stdlib" nodes="--nodes 2 --nodes 4 --nodes 8 --nodes 16 --nodes 32"
    # shellcheck disable=SC2086
    run verify-order $tasks --limit 3 --drafter order --drafter calibrated --drafter linear $nodes --temperature 0 --temperature 1
    # shellcheck disable=SC2086
    run verify-order-top-p $tasks --limit 3 --drafter order --drafter calibrated $nodes --temperature 0.7 --top-p 0.9
}

targets() {  # the six trained targets (alone: benchmarks/verify.sh targets)
    local name
    for name in llada dream sdar-b8 bd3lm llada_moe fast_dllm_v2; do
        run "verify-target-$name" --model "zoo/targets/$name" --limit 2 --max-new-tokens 64 --drafter auto --drafter chain --nodes 8 --temperature 0 --temperature 1 --threads 1
    done
}

if [ "${1:-}" = targets ]; then
    targets
    exit
fi
human_eval &
families
learned
targets
wait
