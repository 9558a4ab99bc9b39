/* One rank of an MPI that `weft bench` measures: waits for commands on the harness's socket and
 * times collectives. Compiled by the harness with each MPI's own compiler.
 *
 * Commands and answers are those of protocol.h. Between commands a rank waits in read(), never
 * inside MPI, which would spin and take the processors from whoever is measured then. */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

struct kind {
  const char* name;
  MPI_Datatype type;
  size_t size;
  int is_float;
};

struct request {
  char collective[32], type[16], op[16];
  long long count;
  int warmups, iterations, check;
};

static int rank, ranks;
static char *input, *output;
static size_t capacity;

static FILE *commands, *answers;

static int connect_harness(void) {
  const char* path = getenv("WEFT_BENCH_CONTROL");
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  if (path == NULL || strlen(path) >= sizeof address.sun_path) return 0;
  strcpy(address.sun_path, path);
  int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  if (fd < 0 || connect(fd, (struct sockaddr*)&address, sizeof address) != 0) return 0;
  commands = fdopen(fd, "r");
  answers = fdopen(dup(fd), "w");
  return commands != NULL && answers != NULL;
}

static int find_kind(const char* name, struct kind* out) {
  const struct kind kinds[] = {
      {"float32", MPI_FLOAT, 4, 1},  {"float64", MPI_DOUBLE, 8, 1}, {"int8", MPI_INT8_T, 1, 0},
      {"uint8", MPI_UINT8_T, 1, 0},  {"int16", MPI_INT16_T, 2, 0},  {"int32", MPI_INT32_T, 4, 0},
      {"int64", MPI_INT64_T, 8, 0},
  };
  for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; ++i)
    if (strcmp(kinds[i].name, name) == 0) return *out = kinds[i], 1;
  return 0;
}

static int find_op(const char* name, MPI_Op* out) {
  if (strcmp(name, "sum") == 0) return *out = MPI_SUM, 1;
  if (strcmp(name, "min") == 0) return *out = MPI_MIN, 1;
  if (strcmp(name, "max") == 0) return *out = MPI_MAX, 1;
  return 0;
}

/* Element i of what rank r contributes. */
static int value_of(int r, long long i) { return (int)((i + 3LL * r) % 11); }

static int reduced(const char* op, long long i) {
  int result = value_of(0, i);
  for (int r = 1; r < ranks; ++r) {
    int next = value_of(r, i);
    if (strcmp(op, "sum") == 0) result += next;
    if (strcmp(op, "min") == 0 && next < result) result = next;
    if (strcmp(op, "max") == 0 && next > result) result = next;
  }
  return result;
}

static void put(const struct kind* kind, char* at, long long i, int value) {
  at += (size_t)i * kind->size;
  if (kind->is_float && kind->size == 4) {
    float x = (float)value;
    memcpy(at, &x, 4);
  } else if (kind->is_float) {
    double x = value;
    memcpy(at, &x, 8);
  } else {
    int64_t x = value; /* little-endian: its first bytes are the narrower number */
    memcpy(at, &x, kind->size);
  }
}

static int is(const struct kind* kind, const char* at, long long i, int value) {
  char expected[8];
  put(kind, expected, 0, value);
  return memcmp(at + (size_t)i * kind->size, expected, kind->size) == 0;
}

static void once(const struct request* r, const struct kind* kind, MPI_Op op) {
  const int count = (int)r->count, part = count / ranks;
  MPI_Datatype t = kind->type;
  if (strcmp(r->collective, "allreduce") == 0)
    MPI_Allreduce(MPI_IN_PLACE, output, count, t, op, MPI_COMM_WORLD);
  else if (strcmp(r->collective, "reduce-scatter") == 0)
    MPI_Reduce_scatter_block(input, output, part, t, op, MPI_COMM_WORLD);
  else if (strcmp(r->collective, "all-gather") == 0)
    MPI_Allgather(input, part, t, output, part, t, MPI_COMM_WORLD);
  else if (strcmp(r->collective, "broadcast") == 0)
    MPI_Bcast(output, count, t, 0, MPI_COMM_WORLD);
  else if (strcmp(r->collective, "all-to-all") == 0)
    MPI_Alltoall(input, part, t, output, part, t, MPI_COMM_WORLD);
  else
    MPI_Sendrecv(input, count, t, (rank + 1) % ranks, 0, output, count, t,
                 (rank + ranks - 1) % ranks, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

/* One more time with data that tells; how many elements are wrong. */
static long long verify(const struct request* r, const struct kind* kind, MPI_Op op) {
  const long long count = r->count, part = count / ranks;
  const int in_place = strcmp(r->collective, "allreduce") == 0;
  const int broadcast = strcmp(r->collective, "broadcast") == 0;
  for (long long i = 0; i < count; ++i) {
    put(kind, input, i, value_of(rank, i));
    put(kind, output, i, in_place || (broadcast && rank == 0) ? value_of(rank, i) : -1);
  }
  once(r, kind, op);
  long long wrong = 0;
  if (in_place)
    for (long long i = 0; i < count; ++i) wrong += !is(kind, output, i, reduced(r->op, i));
  else if (strcmp(r->collective, "reduce-scatter") == 0)
    for (long long i = 0; i < part; ++i)
      wrong += !is(kind, output, i, reduced(r->op, rank * part + i));
  else if (strcmp(r->collective, "all-gather") == 0)
    for (long long i = 0; i < part * ranks; ++i)
      wrong += !is(kind, output, i, value_of((int)(i / part), i % part));
  else if (broadcast)
    for (long long i = 0; i < count; ++i) wrong += !is(kind, output, i, value_of(0, i));
  else if (strcmp(r->collective, "all-to-all") == 0)
    for (long long i = 0; i < part * ranks; ++i)
      wrong += !is(kind, output, i, value_of((int)(i / part), rank * part + i % part));
  else
    for (long long i = 0; i < count; ++i)
      wrong += !is(kind, output, i, value_of((rank + ranks - 1) % ranks, i));
  return wrong;
}

static int make_room(size_t bytes) {
  if (bytes <= capacity) return 1;
  free(input);
  free(output);
  input = malloc(bytes);
  output = malloc(bytes);
  capacity = input != NULL && output != NULL ? bytes : 0;
  return capacity != 0;
}

static void measure(const struct request* r) {
  struct kind kind;
  MPI_Op op;
  if (!find_kind(r->type, &kind) || !find_op(r->op, &op)) {
    fprintf(answers, "error MPI has no %s of %s\n", r->op, r->type);
    return;
  }
  if (r->count < 0 || r->count > INT32_MAX || !make_room((size_t)r->count * kind.size + 64)) {
    fprintf(answers, "error %lld elements are too many\n", r->count);
    return;
  }
  memset(input, 0, capacity);
  memset(output, 0, capacity);
  for (int i = 0; i < r->warmups; ++i) once(r, &kind, op);
  MPI_Barrier(MPI_COMM_WORLD);
  double begin = MPI_Wtime();
  for (int i = 0; i < r->iterations; ++i) once(r, &kind, op);
  double seconds = MPI_Wtime() - begin;
  long long wrong = r->check ? verify(r, &kind, op) : 0;
  MPI_Barrier(MPI_COMM_WORLD);
  fprintf(answers, "done %.9f %lld\n", seconds, wrong);
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (!connect_harness()) {
    fprintf(stderr, "no harness at WEFT_BENCH_CONTROL\n");
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  char version[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(version, &length);
  version[strcspn(version, ",\n")] = '\0';
  for (char* at = version; *at != '\0'; ++at)
    if (*at == '\t') *at = ' ';
  fprintf(answers, "hello %d %ld %s\n", rank, (long)getpid(), version);
  fflush(answers);
  char line[256];
  struct request r;
  while (fgets(line, sizeof line, commands) != NULL &&
         sscanf(line, "measure %31s %15s %15s %lld %d %d %d", r.collective, r.type, r.op, &r.count,
                &r.warmups, &r.iterations, &r.check) == 7) {
    measure(&r);
    fflush(answers);
  }
  MPI_Finalize();
  return 0;
}
