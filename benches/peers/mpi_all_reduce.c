/* Times MPI_Allreduce as benches/all_reduce.rs times ours: f32, sum, in place, back to back after one barrier; the
   median over rounds of the slowest rank. mpicc -O2 mpi_all_reduce.c -o mpi_all_reduce; mpirun -n N ./mpi_all_reduce */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

int main(int argc, char **argv) {
  int rank, ranks;
  const long sizes[] = {4, 1024, 4096, 16384, 65536, 262144, 1 << 20, 4 << 20, 8 << 20, 16 << 20, 32 << 20, 128 << 20};
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
    long bytes = sizes[s], count = bytes / 4, iterations = 200000000 / (bytes + 20000);
    if (iterations < 5) iterations = 5;
    if (iterations > 2000) iterations = 2000;
    int group = bytes <= 65536 ? 20 : 1, rounds = (int)((iterations + group - 1) / group);
    if (rounds < 5) rounds = 5;
    float *buffer = malloc(bytes);
    double *times = malloc(rounds * sizeof *times);
    for (int round = -2; round < rounds; round++) {
      for (long i = 0; i < count; i++) buffer[i] = 1;
      MPI_Barrier(MPI_COMM_WORLD);
      double start = MPI_Wtime();
      for (int i = 0; i < group; i++)
        MPI_Allreduce(MPI_IN_PLACE, buffer, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      double mine = (MPI_Wtime() - start) / group, slowest;
      MPI_Allreduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
      if (round >= 0) times[round] = slowest;
    }
    qsort(times, rounds, sizeof *times, ascending);
    if (rank == 0) printf("mpi allreduce n=%d bytes=%ld med=%.2fus\n", ranks, bytes, times[rounds / 2] * 1e6);
    free(buffer);
    free(times);
  }
  return MPI_Finalize();
}
