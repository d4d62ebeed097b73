/* Times a collective of MPI as `allstream perf` times ours: f32, sum; two rounds that do not count; buffers filled, a
   barrier, then operations back to back; the slowest rank's time of each round, the median over rounds.
   mpicc -O2 mpi_collectives.c -o mpi_collectives; mpirun -n N ./mpi_collectives COLLECTIVE BYTES,BYTES,...
   A line for each size and form: "time COLLECTIVE FORM RANKS BYTES MICROSECONDS". BYTES are those of a rank's largest
   buffer. A wrong result ends it with an error. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE, ALL_TO_ALL, COLLECTIVES };
static const char *const names[] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all"};

static int rank, ranks;

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static int blocks(int what) { return what == REDUCE_SCATTER || what == ALL_GATHER || what == ALL_TO_ALL; }

/* `count` elements of a block, or of the buffer where it is not cut into blocks. In place, `out` is the buffer. */
static void once(int what, int in_place, const float *in, float *out, int count) {
  MPI_Comm all = MPI_COMM_WORLD;
  const void *from = in_place ? MPI_IN_PLACE : in;
  switch (what) {
  case ALL_REDUCE: MPI_Allreduce(from, out, count, MPI_FLOAT, MPI_SUM, all); break;
  case REDUCE_SCATTER: MPI_Reduce_scatter_block(from, out, count, MPI_FLOAT, MPI_SUM, all); break;
  case ALL_GATHER: MPI_Allgather(from, count, MPI_FLOAT, out, count, MPI_FLOAT, all); break;
  case BROADCAST: MPI_Bcast(out, count, MPI_FLOAT, 0, all); break;
  case REDUCE:
    /* In place is the root's word; everyone else's buffer is an input. */
    if (rank == 0) MPI_Reduce(from, out, count, MPI_FLOAT, MPI_SUM, 0, all);
    else MPI_Reduce(in_place ? out : in, NULL, count, MPI_FLOAT, MPI_SUM, 0, all);
    break;
  case ALL_TO_ALL: MPI_Alltoall(from, count, MPI_FLOAT, out, count, MPI_FLOAT, all); break;
  }
}

static long wrong(int what, const float *out, long count, long elements) {
  const float sum = ranks * (ranks + 1) / 2.0f;
  long found = 0;
  if (what == REDUCE && rank != 0) return 0;
  for (long i = 0; i < (what == REDUCE_SCATTER ? count : elements); i++) {
    float expected = what == ALL_GATHER || what == ALL_TO_ALL ? (float)(i / count + 1) : what == BROADCAST ? 1 : sum;
    found += out[i] != expected;
  }
  return found;
}

static float *make(long elements) {
  float *made = malloc(elements * sizeof *made);
  if (!made) {
    fprintf(stderr, "rank %d: no memory for %ld floats\n", rank, elements);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  return made;
}

static void fill(float *buffer, long elements) {
  for (long i = 0; i < elements; i++) buffer[i] = (float)(rank + 1);
}

static void measure(int what, int in_place, long bytes, long count) {
  long elements = blocks(what) ? count * ranks : count, iterations = 200000000 / (bytes + 20000);
  iterations = iterations < 5 ? 5 : iterations > 2000 ? 2000 : iterations;
  int group = bytes <= 65536 ? 20 : 1, rounds = (int)((iterations + group - 1) / group);
  float *in = in_place ? NULL : make(elements), *out = make(elements);
  double *mine = malloc(rounds * sizeof *mine), *slowest = malloc(rounds * sizeof *slowest);
  for (int round = -2; round <= rounds; round++) {
    if (in) fill(in, elements);
    fill(out, elements);
    MPI_Barrier(MPI_COMM_WORLD);
    if (round == rounds) break; /* filled for the check */
    double start = MPI_Wtime();
    for (int i = 0; i < group; i++) once(what, in_place, in, out, (int)count);
    if (round >= 0) mine[round] = (MPI_Wtime() - start) / group;
    MPI_Barrier(MPI_COMM_WORLD); /* who is through does not take the core, to fill its buffer, from who is not */
  }
  once(what, in_place, in, out, (int)count);
  long bad = wrong(what, out, count, elements), all_bad = 0;
  MPI_Allreduce(&bad, &all_bad, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
  if (all_bad) {
    if (rank == 0) fprintf(stderr, "%s of %ld bytes: %ld elements are wrong\n", names[what], bytes, all_bad);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Allreduce(mine, slowest, rounds, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  qsort(slowest, rounds, sizeof *slowest, ascending);
  if (rank == 0) {
    const char *form = in_place ? "in_place" : "out_of_place";
    printf("time %s %s %d %ld %.3f\n", names[what], form, ranks, bytes, slowest[rounds / 2] * 1e6);
    fflush(stdout);
  }
  free(in);
  free(out);
  free(mine);
  free(slowest);
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  int what = 0;
  while (what < COLLECTIVES && (argc != 3 || strcmp(argv[1], names[what]))) what++;
  if (what == COLLECTIVES) {
    if (rank == 0) fprintf(stderr, "usage: mpi_collectives COLLECTIVE BYTES,BYTES,...\n");
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  long before = 0;
  for (char *at = strtok(argv[2], ","); at; at = strtok(NULL, ",")) {
    /* At least one element a block, as ours. */
    long count = atol(at) / 4 / (blocks(what) ? ranks : 1), bytes;
    if (count < 1) count = 1;
    bytes = count * 4 * (blocks(what) ? ranks : 1);
    if (bytes == before) continue;
    before = bytes;
    /* The forms that are compared: all_reduce and broadcast as training loops call them. */
    if (what != ALL_REDUCE && what != BROADCAST) measure(what, 0, bytes, count);
    measure(what, 1, bytes, count);
  }
  return MPI_Finalize();
}
