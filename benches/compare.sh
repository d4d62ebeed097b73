#!/usr/bin/env bash
# All-reduce beside OpenMPI and Gloo: same sizes, same ranks, interleaved rounds, medians. Writes a Markdown table.
#   benches/compare.sh ROUNDS RANKS...          PYTHON=python-with-torch MPIRUN=mpirun.openmpi MPICC=mpicc.openmpi
# A peer that is not installed is left out, and the table says so.
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${1:-3}; shift || true
ranks=${*:-2 4 8}
python=${PYTHON:-python3} mpirun=${MPIRUN:-mpirun.openmpi} mpicc=${MPICC:-mpicc.openmpi}
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
cargo bench --bench all_reduce --no-run >"$work/build" 2>&1 || { cat "$work/build" >&2; exit 1; }
ours=$(sed -n 's/.*(\(.*all_reduce-[0-9a-f]*\)).*/\1/p' "$work/build" | tail -n 1)
mpi= gloo=
command -v "$mpicc" >/dev/null && "$mpicc" -O2 benches/peers/mpi_all_reduce.c -o "$work/mpi" && mpi=yes
"$python" -c 'import torch' 2>/dev/null && gloo=yes
keep() { sed -n "s/.*n=\([0-9]*\) bytes=\([0-9]*\) med=\([0-9.]*\)us.*/$1 \1 \2 \3/p" >>"$work/all"; }
for n in $ranks; do
    for round in $(seq "$rounds"); do
        echo "n=$n round $round of $rounds" >&2
        timeout 300 "$ours" "$n" shm | keep shm
        timeout 300 "$ours" "$n" shm await | keep await
        timeout 300 "$ours" "$n" tcp | keep tcp
        timeout 300 "$ours" "$n" threads | keep threads
        if [ -n "$mpi" ]; then
            run="$mpirun --allow-run-as-root --oversubscribe --mca mpi_yield_when_idle 1 -n $n"
            timeout 300 $run --mca btl vader,self "$work/mpi" | keep mpi_shm
            timeout 300 $run --mca btl tcp,self --mca btl_tcp_if_include lo "$work/mpi" | keep mpi_tcp
        fi
        [ -z "$gloo" ] || timeout 300 "$python" benches/peers/gloo_all_reduce.py "$n" $((20000 + RANDOM % 10000)) | keep gloo
    done
done
echo "All-reduce, f32, sum, in place, back to back; microseconds, the median of $rounds interleaved rounds (each the"
echo "median over its repetitions of the slowest rank). $(nproc) cores, $(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1), load $(cut -d' ' -f1 /proc/loadavg) at the end, $(date -u +%F)."
[ -n "$mpi" ] && echo "$("$mpirun" --version | head -n 1)." || echo "OpenMPI is not installed: left out."
[ -n "$gloo" ] && echo "Gloo of torch $("$python" -c 'import torch; print(torch.__version__)')." || echo "torch is not installed: left out."
for n in $ranks; do
    printf '\n### %s ranks\n\n' "$n"
    echo "| bytes | shm | shm, .await | threads | OpenMPI shm | **shm / OpenMPI** | tcp | OpenMPI tcp | **tcp / OpenMPI** | Gloo | **shm / Gloo** | **tcp / Gloo** |"
    echo "|---|---|---|---|---|---|---|---|---|---|---|---|"
    awk -v n="$n" '
        $2 == n { k = $1 SUBSEP $3; v[k, ++c[k]] = $4; if (!($3 in seen)) { seen[$3]; order[++m] = $3 } }
        function med(name, b,   k, i, j, t, l) {
            k = name SUBSEP b; l = c[k]; if (!l) return 0
            for (i = 1; i <= l; i++) a[i] = v[k, i]
            for (i = 1; i <= l; i++) for (j = i + 1; j <= l; j++) if (a[j] < a[i]) { t = a[i]; a[i] = a[j]; a[j] = t }
            return a[int((l + 1) / 2)]
        }
        function show(x) { return x ? sprintf(x < 100 ? "%.1f" : "%.0f", x) : "-" }
        function ratio(x, y) { return x && y ? sprintf("%.2f", x / y) : "-" }
        END { for (i = 1; i <= m; i++) { b = order[i]
            s = med("shm", b); w = med("await", b); h = med("threads", b); o = med("mpi_shm", b)
            t = med("tcp", b); p = med("mpi_tcp", b); g = med("gloo", b)
            printf "| %d | %s | %s | %s | %s | %s | %s | %s | %s | %s | %s | %s |\n", b, show(s), show(w), show(h),
                show(o), ratio(s, o), show(t), show(p), ratio(t, p), show(g), ratio(s, g), ratio(t, g) } }' "$work/all"
done
