/* The header as a C compiler sees it, used as a C program would. */
#include "plain_test.h"

#include <string.h>

#include "weft/c.h"

_Static_assert(sizeof(weft_status) == 4, "enums are as wide as the ABI says");
_Static_assert(sizeof(weft_type) == 4 && sizeof(weft_op) == 4, "and so are these");
_Static_assert(offsetof(weft_options, struct_size) == 0, "the size comes first");
_Static_assert(offsetof(weft_call, struct_size) == 0, "the size comes first");
_Static_assert(offsetof(weft_tensor, struct_size) == 0, "the size comes first");

/* Returns the line from the function in which it stands. */
#define MUST(condition)                \
  do {                                 \
    if (!(condition)) return __LINE__; \
  } while (0)

static void note(void* data, weft_status status, const char* message) {
  int* seen = data;
  seen[0] += 1;
  seen[1] = (int)status;
  seen[2] = (int)strlen(message);
}

int plain_c_program(void) {
  weft_options options = WEFT_OPTIONS_INIT;
  options.size = 1;
  options.trace = "";
  options.plan = "ddp";
  weft_group* group = NULL;
  MUST(weft_join(&options, &group) == WEFT_OK);
  uint32_t rank = 7, size = 7;
  MUST(weft_rank(group, &rank) == WEFT_OK && rank == 0);
  MUST(weft_size(group, &size) == WEFT_OK && size == 1);

  float data[3] = {1, 2, 3};
  MUST(weft_all_reduce(group, NULL, data, 3, WEFT_FLOAT32, WEFT_SUM) == WEFT_OK);
  MUST(data[0] == 1 && data[1] == 2 && data[2] == 3);

  weft_call call = WEFT_CALL_INIT;
  call.output = data;
  call.count = 3;
  weft_work* work = NULL;
  int seen[3] = {0, -1, -1};
  MUST(weft_start(group, &call, &work) == WEFT_OK);
  MUST(weft_on_done(work, note, seen) == WEFT_OK);
  MUST(weft_wait(work) == WEFT_OK);
  int done = 0;
  MUST(weft_test(work, &done) == WEFT_OK && done == 1);
  weft_work_free(work);

  weft_tensor tensor = {sizeof tensor, "t", NULL, 3, 0, data, WEFT_FLOAT32};
  weft_exchange* exchange = NULL;
  MUST(weft_exchange_create(group, &tensor, 1, &exchange) == WEFT_OK);
  MUST(weft_exchange_ready(exchange, 0, 0) == WEFT_OK);
  MUST(weft_exchange_wait(exchange, 0, 0) == WEFT_OK);
  MUST(weft_exchange_wait_all(exchange, 0) == WEFT_OK);
  weft_exchange_free(exchange);

  MUST(weft_leave(group) == WEFT_OK);
  weft_free(group);
  MUST(seen[0] == 1 && seen[1] == WEFT_OK && seen[2] == 0);
  return 0;
}
