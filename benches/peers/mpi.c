/* An MPI library's all-reduce, measured as `paceline bench` measures its own: float sums, in place.
 *
 * Usage: mpirun -n N mpi LIBRARY TRANSPORT SECONDS BYTES...
 *
 * LIBRARY and TRANSPORT are the names to report. Rank 0 prints one JSON object for each size. Every rank times its own
 * call after a barrier, and the slowest rank's time of each iteration counts. Sizes are measured for about SECONDS each.
 * Results are compared with exact sums before and after.
 */
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { WARMUP = 5, ITERATIONS_MIN = 5, ITERATIONS_MAX = 1000000 };

static int rank, world;

static int ascending(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static double quantile(const double *sorted, long count, double share) {
    long index = (long)ceil(share * (double)count);
    return sorted[(index < 1 ? 1 : index) - 1];
}

static void *allocate(size_t count, size_t bytes) {
    void *memory = calloc(count, bytes);
    if (memory == NULL) {
        fprintf(stderr, "mpi: no memory for %zu elements\n", count);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    return memory;
}

/* Small whole numbers: their sums are exact in any order. */
static float input(int of_rank, long at) {
    return (float)((3 * at + 5 * of_rank + 1) % 16);
}

static void all_reduce(float *data, int elements) {
    MPI_Allreduce(MPI_IN_PLACE, data, elements, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static long wrong_elements(float *data, int elements) {
    for (long at = 0; at < elements; at++) {
        data[at] = input(rank, at);
    }
    all_reduce(data, elements);
    long wrong = 0;
    for (long at = 0; at < elements; at++) {
        float expected = 0;
        for (int of_rank = 0; of_rank < world; of_rank++) {
            expected += input(of_rank, at);
        }
        wrong += data[at] != expected;
    }
    MPI_Allreduce(MPI_IN_PLACE, &wrong, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    return wrong;
}

static double timed(float *data, int elements) {
    MPI_Barrier(MPI_COMM_WORLD);
    double began = MPI_Wtime();
    all_reduce(data, elements);
    return MPI_Wtime() - began;
}

static void slowest(double *seconds, long count) {
    MPI_Allreduce(MPI_IN_PLACE, seconds, (int)count, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    qsort(seconds, (size_t)count, sizeof *seconds, ascending);
}

static long iterations_for(float *data, int elements, double seconds) {
    double walls[WARMUP];
    for (int at = 0; at < WARMUP; at++) {
        double began = MPI_Wtime();
        timed(data, elements);
        walls[at] = MPI_Wtime() - began;
    }
    qsort(walls, WARMUP, sizeof *walls, ascending);
    double typical = quantile(walls, WARMUP, 0.5);
    slowest(&typical, 1);
    double iterations = seconds / fmax(typical, 1e-9);
    return (long)fmin(fmax(iterations, ITERATIONS_MIN), ITERATIONS_MAX);
}

static void measure(const char *library, const char *transport, double seconds, long bytes) {
    int elements = (int)(bytes / 4 > 0 ? bytes / 4 : 1);
    float *data = allocate((size_t)elements, sizeof *data);
    long wrong = wrong_elements(data, elements);
    for (long at = 0; at < elements; at++) {
        data[at] = 0;
    }
    long iterations = iterations_for(data, elements, seconds);
    double *times = allocate((size_t)iterations, sizeof *times);
    for (long at = 0; at < iterations; at++) {
        times[at] = timed(data, elements);
    }
    slowest(times, iterations);
    wrong += wrong_elements(data, elements);
    if (rank == 0) {
        double p50 = quantile(times, iterations, 0.5);
        double algbw = elements * 4.0 / fmax(p50, 1e-9) / 1e9;
        printf("{\"record\":\"timing\",\"library\":\"%s\",\"operation\":\"all-reduce\",\"transport\":\"%s\","
               "\"world\":%d,\"memory\":null,\"bytes\":%ld,\"elements\":%d,\"dtype\":\"f32\",\"reduction\":\"sum\","
               "\"iterations\":%ld,\"min_us\":%.3f,\"p50_us\":%.3f,\"p99_us\":%.3f,\"algbw_gb_s\":%.4f,"
               "\"busbw_gb_s\":%.4f,\"wrong\":%ld}\n",
               library, transport, world, elements * 4L, elements, iterations, times[0] * 1e6, p50 * 1e6,
               quantile(times, iterations, 0.99) * 1e6, algbw, algbw * 2 * (world - 1) / world, wrong);
        fflush(stdout);
    }
    free(times);
    free(data);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    if (argc < 5) {
        fprintf(stderr, "usage: mpirun -n N mpi LIBRARY TRANSPORT SECONDS BYTES...\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    for (int at = 4; at < argc; at++) {
        long bytes = strtol(argv[at], NULL, 10);
        if (bytes < 1 || bytes > 1L << 30) {
            fprintf(stderr, "mpi: %s is no size\n", argv[at]);
            MPI_Abort(MPI_COMM_WORLD, 2);
        }
        measure(argv[1], argv[2], strtod(argv[3], NULL), bytes);
    }
    MPI_Finalize();
    return 0;
}
