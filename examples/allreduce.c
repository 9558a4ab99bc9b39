/* The smallest job in C: a sum, then an operation that runs while this thread does other things.
 *
 *   weft run -n 3 -- ./allreduce_c
 */
#include <stdio.h>
#include <stdlib.h>

#include "weft/c.h"

#define COUNT 50021u

/* Every call returns a status; the words for it are kept by thread. */
static void must(weft_status status, const char* what) {
  if (status == WEFT_OK) return;
  fprintf(stderr, "allreduce: %s: %s: %s\n", what, weft_status_name(status), weft_last_error());
  exit(1);
}

static void count_up(void* data, weft_status status, const char* message) {
  (void)message;
  if (status == WEFT_OK) ++*(int*)data;
}

int main(void) {
  weft_group* group = NULL;
  must(weft_join(NULL, &group), "join"); /* NULL: all from the environment */
  uint32_t rank = 0, size = 0;
  must(weft_rank(group, &rank), "rank");
  must(weft_size(group, &size), "size");

  static double data[COUNT];
  for (uint32_t i = 0; i < COUNT; ++i) data[i] = (double)i * (rank + 1);
  /* No input: it is in place. */
  must(weft_all_reduce(group, NULL, data, COUNT, WEFT_FLOAT64, WEFT_SUM), "all_reduce");
  for (uint32_t i = 0; i < COUNT; ++i) {
    const double expected = (double)i * size * (size + 1) / 2;
    if (data[i] != expected) {
      fprintf(stderr, "allreduce: element %u is %g, not %g\n", i, data[i], expected);
      return 1;
    }
  }

  /* The long form: INIT fills in the size of the struct and what is usual. */
  weft_call call = WEFT_CALL_INIT;
  int32_t tallest = (int32_t)rank;
  call.output = &tallest;
  call.count = 1;
  call.type = WEFT_INT32;
  call.op = WEFT_MAX;
  weft_work* work = NULL;
  int told = 0;
  must(weft_start(group, &call, &work), "start");
  must(weft_on_done(work, count_up, &told), "on_done");
  /* ... compute here; `tallest` belongs to the operation until it is done ... */
  must(weft_wait(work), "wait");
  weft_work_free(work);
  if (tallest != (int32_t)size - 1) {
    fprintf(stderr, "allreduce: the largest rank is %d\n", (int)tallest);
    return 1;
  }

  printf("rank %u of %u: the sums are right\n", rank, size);
  must(weft_leave(group), "leave");
  weft_free(group); /* now every callback has been called */
  return told == 1 ? 0 : 1;
}
