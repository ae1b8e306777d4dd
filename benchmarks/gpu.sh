#!/usr/bin/env bash
# What to run when a Hopper GPU is at hand for half an hour: the most valuable part first, each under ten minutes.
#
#     benchmarks/gpu.sh OUT                      # every part, in order
#     benchmarks/gpu.sh OUT check kernels        # only these
#     REHEARSE=1 benchmarks/gpu.sh OUT           # all of it on the CPU, very small, to see that it runs
#
# It needs `pip install -e '.[cuda,test]'` and tyro. A part that fails does not stop the next. OUT gets a log of each part
# and the results as JSON; those of a GPU belong into benchmarks/results, from where the documentation takes its figures.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:?say where to put the results}" && cd "$1" && pwd)
shift
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(first check kernels profile train serve tune again)
python=${PYTHON:-python}
export XLA_PYTHON_CLIENT_PREALLOCATE=false TPU_LOG_DIR=disabled
rehearse=()
if [ -n "${REHEARSE:-}" ]; then
    rehearse=(--rehearse)
    export JAX_PLATFORMS=cpu
fi

# Errors first (a wrong kernel is not timed), then what each decision needs; see benchmarks/README.md.
ATTENTION=("bf16 matmul*" "causal D128 T8k" "causal D64 T8k" "causal D256 T8k" "Llama 3 8B T4k" "8 documents*" "gpt-oss local*" "DeepSeek V3 T4k")
REST=("Qwen3-30B-A3B *" "fp8 blocks 8192*" "fp8 tensor 8192^3" "cross-entropy*" "decode*" "gate and up*" "states*" "int8 matrix*")
TUNED=("8 documents D128 T8k" "Qwen3-30B-A3B up" "Qwen3-30B-A3B down")

run() {
    name=$1
    shift
    printf '\n=== %s, after %d s: %s\n' "$name" "$SECONDS" "$*"
    timeout --kill-after=10 590 "$@" 2>&1 | tee "$out/$name.log" | tail -n "${LINES_SHOWN:-80}"
    printf '=== %s: exit %d\n' "$name" "${PIPESTATUS[0]}"
}

for part in "${parts[@]}"; do
    case $part in
    first)
        nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv 2>&1 | tee "$out/card.txt"
        $python -m pip list 2>/dev/null | grep -i -E '^(jax|nvidia-c|torch|triton)' | tee -a "$out/card.txt"
        run first $python -m benchmarks.first --out "$out" "${rehearse[@]}"
        # The ways out of docs/kernels.md. If only the first of the three is right, set no such flag.
        XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_enable_command_buffer=" run first-without-graphs \
            $python -m benchmarks.first --only attention --out "$out/without-graphs" "${rehearse[@]}"
        XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_deterministic_ops=true" run first-deterministic \
            $python -m benchmarks.first --only attention --out "$out/deterministic" "${rehearse[@]}"
        ;;
    check)
        if [ -z "${REHEARSE:-}" ]; then
            run mosaic $python -m tests.kernels.test_mosaic
            JAX_PLATFORMS=cuda,cpu run tests $python -m pytest -q -n 6 -p no:cacheprovider tests/kernels \
                -k "triton or cudnn or mosaic"
        else
            run tests $python -m pytest -q -p no:cacheprovider tests/kernels/test_attention_triton.py
        fi
        ;;
    kernels)
        run kernels-attention $python -m benchmarks.kernels --only "${ATTENTION[@]}" --by triton mosaic cudnn xla \
            "jax.nn*" "torch cudnn" jnp torch --regions 5 --seconds 280 --out "$out/attention" "${rehearse[@]}"
        run kernels-rest $python -m benchmarks.kernels --only "bf16 matmul*" "${REST[@]}" --by "triton*" mosaic xla "lax*" \
            "torch g*" "torch fla" "torch mamba_ssm" "whole*" "two*" jnp torch --regions 5 --seconds 220 --out "$out/rest" "${rehearse[@]}"
        ;;
    profile)
        run profile $python -m benchmarks.profile --only llama3.2-3b --out "$out" "${rehearse[@]}"
        run profile-experts $python -m benchmarks.profile --only "qwen3-30b*" --tokens 16384 --remat full \
            --out "$out/experts" "${rehearse[@]}"
        ;;
    train)
        run train $python -m benchmarks.train --only llama3.2-3b --by zoo torch "zoo, fp8" --seconds 300 \
            --out "$out" "${rehearse[@]}"
        run train-experts $python -m benchmarks.train --only "qwen3-30b*" --by zoo --tokens 32768 --remat full \
            --out "$out/experts" "${rehearse[@]}"
        run train-lora $python -m benchmarks.train --only "*LoRA*" --by zoo --out "$out/lora" "${rehearse[@]}"
        ;;
    serve)
        run serve $python -m benchmarks.serve --only "*batch 1" "*batch 64" --seconds 300 --out "$out" "${rehearse[@]}"
        run serve-rows $python -m benchmarks.serve --only "*batch 16" "*batch 256" --seconds 280 --out "$out/rows" \
            "${rehearse[@]}"
        ;;
    tune)
        run tune $python -m benchmarks.tune --shortlist --only "${TUNED[@]}" --seconds 420 --out "$out/block_sizes" \
            "${rehearse[@]}"
        ;;
    again)  # what was tuned, with the sizes found
        [ -n "${REHEARSE:-}" ] || cp -r "$out"/block_sizes/. kernels/ 2>/dev/null
        run kernels-again $python -m benchmarks.kernels --only "bf16 matmul*" "${TUNED[@]}" --by triton mosaic jnp \
            --regions 5 --seconds 200 --out "$out/again" "${rehearse[@]}"
        ;;
    *)
        echo "There is no part $part."
        exit 2
        ;;
    esac
done
echo "$SECONDS s; results in $out"
