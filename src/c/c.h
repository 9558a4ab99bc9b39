/* c: weft for C, and for every language that can call C.
 *
 *   weft_group* group;
 *   if (weft_join(NULL, &group) != WEFT_OK) return complain(weft_last_error());
 *   weft_all_reduce(group, NULL, data, count, WEFT_FLOAT32, WEFT_SUM);
 *   weft_leave(group);
 *   weft_free(group);
 *
 * What the calls do is what weft/api.h says of the ones with the same name; docs/api.md has tables
 * for both. This header is plain C11 and knows no framework.
 *
 * Errors: every call returns a weft_status; what exactly failed is in weft_last_error() of the same
 * thread. A call that fails leaves its results untouched. Nothing throws, nothing ends the process.
 * A handle or result that is NULL is refused, except by the calls that free, which do nothing then.
 *
 * Lifetimes: each handle is freed once, by the call named for it, in any order: what they share
 * goes with the last one. An operation goes on without its handle, and its memory belongs to it
 * until it is done.
 *
 * Threads: all calls from any thread, except that nobody uses a handle while it is being freed. A
 * callback runs in the thread that finds the work done: it may start work, abort and free handles,
 * but a call that waits is refused there.
 *
 * Versions: a struct begins with its size, which the INIT macros set together with zeros for all
 * else; new members come at the end, and 0 means that the caller does not say. Values of enums are
 * never renumbered.
 */
#ifndef WEFT_C_H
#define WEFT_C_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define WEFT_API __attribute__((visibility("default")))
#else
#define WEFT_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- words ------------------------------------------------------------------------------- */

typedef struct weft_group weft_group;
typedef struct weft_work weft_work;
typedef struct weft_exchange weft_exchange;

/* The last value of each enum only makes it as wide as an int, whatever the compiler is told. */
typedef enum weft_status {
  WEFT_OK = 0,
  WEFT_INVALID_ARGUMENT = 1,
  WEFT_NOT_FOUND = 2,
  WEFT_CORRUPT = 3,
  WEFT_UNSUPPORTED = 4,
  WEFT_IO = 5,
  WEFT_PEER_LOST = 6,
  WEFT_TIMEOUT = 7,
  WEFT_CANCELLED = 8,
  WEFT_EXHAUSTED = 9,
  WEFT_STATUS_WIDTH = 0x7fffffff
} weft_status;

typedef enum weft_type {
  WEFT_FLOAT32 = 1,
  WEFT_FLOAT64 = 2,
  WEFT_FLOAT16 = 3,
  WEFT_BFLOAT16 = 4,
  WEFT_INT8 = 5,
  WEFT_INT16 = 6,
  WEFT_INT32 = 7,
  WEFT_INT64 = 8,
  WEFT_UINT8 = 9,
  WEFT_TYPE_WIDTH = 0x7fffffff
} weft_type;

typedef enum weft_op {
  WEFT_SUM = 1,
  WEFT_MEAN = 2,
  WEFT_MIN = 3,
  WEFT_MAX = 4,
  WEFT_PRODUCT = 5,
  WEFT_BIT_AND = 6, /* integers only, as the next two */
  WEFT_BIT_OR = 7,
  WEFT_BIT_XOR = 8,
  WEFT_OP_WIDTH = 0x7fffffff
} weft_op;

typedef enum weft_collective {
  WEFT_ALL_REDUCE = 1,
  WEFT_REDUCE_SCATTER = 2,
  WEFT_ALL_GATHER = 3,
  WEFT_BROADCAST = 4,
  WEFT_REDUCE = 5,
  WEFT_GATHER = 6,
  WEFT_SCATTER = 7,
  WEFT_ALL_TO_ALL = 8,
  WEFT_BARRIER = 9,
  WEFT_SEND = 10,
  WEFT_RECEIVE = 11,
  WEFT_COLLECTIVE_WIDTH = 0x7fffffff
} weft_collective;

typedef enum weft_algorithm {
  WEFT_BY_PLAN = 0, /* by the plan and the size */
  WEFT_RING = 1,
  WEFT_HALVING_DOUBLING = 2,
  WEFT_TREE = 3,
  WEFT_HIERARCHICAL = 4,
  WEFT_DOUBLING = 5,
  WEFT_DIRECT = 6,
  WEFT_ALGORITHM_WIDTH = 0x7fffffff
} weft_algorithm;

typedef enum weft_choice {
  WEFT_AS_ENVIRONMENT = 0,
  WEFT_YES = 1,
  WEFT_NO = 2,
  WEFT_CHOICE_WIDTH = 0x7fffffff
} weft_choice;

/* "0.1.0", as the library that runs says it. */
WEFT_API const char* weft_version(void);
/* "peer_lost" */
WEFT_API const char* weft_status_name(weft_status status);
/* What failed in this thread last: what, where, and what to do. Valid until the next failure in
 * this thread; "" if there was none. */
WEFT_API const char* weft_last_error(void);
/* Frees a text that weft gave. */
WEFT_API void weft_text_free(char* text);

/* ---- joining ----------------------------------------------------------------------------- */

/* What is 0 or NULL comes from the environment: see weft/api.h for the variables. */
typedef struct weft_options {
  size_t struct_size;
  /* With size 0 these five come from the environment, with another all from here. */
  uint32_t rank;
  uint32_t size;
  const char* rendezvous; /* "address:port" of rank 0, "[v6]:port", or "file:PATH" on one host */
  const char* secret; /* an even number of hexadecimal digits, 32 at least; the same on all ranks */
  const char* host;   /* this host's name in messages; NULL: "localhost" */
  const char* plan;   /* a plan's file or a preset */
  const char* trace;  /* a folder; "": no recording */
  const char* interface_name;
  weft_choice shared_memory;
  weft_choice probe; /* measure the network when joining; as environment: if recording */
  uint64_t join_timeout_ms;
  uint64_t progress_timeout_ms;
} weft_options;
#define WEFT_OPTIONS_INIT \
  { sizeof(weft_options), 0, 0, 0, 0, 0, 0, 0, 0, WEFT_AS_ENVIRONMENT, WEFT_AS_ENVIRONMENT, 0, 0 }

/* Becomes a member of the job. `options` may be NULL. */
WEFT_API weft_status weft_join(const weft_options* options, weft_group** group);
WEFT_API weft_status weft_rank(const weft_group* group, uint32_t* rank);
WEFT_API weft_status weft_size(const weft_group* group, uint32_t* size);
/* Some ranks of a group as a group of their own, in this order; its members call it alike. */
WEFT_API weft_status weft_subgroup(weft_group* group, const uint32_t* ranks, size_t count,
                                   weft_group** subgroup);
/* Waits until all ranks want to leave. A rank that is gone without it is seen as lost. */
WEFT_API weft_status weft_leave(weft_group* group);
WEFT_API void weft_free(weft_group* group);

/* ---- operations -------------------------------------------------------------------------- */

/* An operation of all ranks of a group. Counts are elements.
 *
 *                   count                    input           output
 *   all_reduce      of the array             count           count; may be the same memory
 *   reduce_scatter  of all blocks together   count           own block; may be its place in input
 *   all_gather      of all blocks together   own block       count; input may be its place in it
 *   broadcast       of the array             root: count     count
 *   reduce          of the array             count           root: count
 *   gather          of all blocks together   own block       root: count
 *   scatter         of all blocks together   root: count     own block
 *   all_to_all      sent by this rank        count           sum of receive_counts
 *   barrier         -                        -               -
 *   send            of the message           count           -
 *   receive         of the message           -               count
 *
 * Blocks are as equal as can be (the first ones larger), or as `counts` says. An input that is NULL
 * is the output's memory. */
typedef struct weft_call {
  size_t struct_size;
  weft_collective collective;
  weft_type type;
  weft_op op; /* all_reduce, reduce_scatter, reduce */
  weft_algorithm algorithm;
  const void* input;
  void* output;
  uint64_t count;
  const uint64_t* counts;         /* NULL, or one a rank */
  const uint64_t* receive_counts; /* all_to_all: NULL, or one a rank */
  int64_t priority;               /* smaller goes first */
  uint32_t root;                  /* in the group; send, receive: the other rank */
} weft_call;
#define WEFT_CALL_INIT \
  { sizeof(weft_call), WEFT_ALL_REDUCE, WEFT_FLOAT32, WEFT_SUM, WEFT_BY_PLAN, 0, 0, 0, 0, 0, 0, 0 }

/* All ranks of a group call the same operations in the same order. Many may be in flight. */
WEFT_API weft_status weft_run(weft_group* group, const weft_call* call);
WEFT_API weft_status weft_start(weft_group* group, const weft_call* call, weft_work** work);
/* Returns when the result is there, or with the group's failure. May be called again. */
WEFT_API weft_status weft_wait(weft_work* work);
/* Moves things along; `done` is 1 when finished or failed, which weft_wait then tells. */
WEFT_API weft_status weft_test(weft_work* work, int* done);
/* `message` is "" for WEFT_OK, and lives as long as the call. */
typedef void (*weft_callback)(void* data, weft_status status, const char* message);
/* Calls back exactly once: when done, when failed, or with WEFT_CANCELLED when the last handle of
 * the group is freed before. At once, in this thread, if it is done already. */
WEFT_API weft_status weft_on_done(weft_work* work, weft_callback callback, void* data);
WEFT_API void weft_work_free(weft_work* work);

/* The same in short, waiting for the result. */
WEFT_API weft_status weft_all_reduce(weft_group* group, const void* input, void* output,
                                     uint64_t count, weft_type type, weft_op op);
WEFT_API weft_status weft_reduce_scatter(weft_group* group, const void* input, void* output,
                                         uint64_t count, weft_type type, weft_op op);
WEFT_API weft_status weft_all_gather(weft_group* group, const void* input, void* output,
                                     uint64_t count, weft_type type);
/* Blocks of different sizes: `counts` has one a rank. */
WEFT_API weft_status weft_all_gatherv(weft_group* group, const void* input, void* output,
                                      const uint64_t* counts, weft_type type);
WEFT_API weft_status weft_broadcast(weft_group* group, void* data, uint64_t count, weft_type type,
                                    uint32_t root);
WEFT_API weft_status weft_reduce(weft_group* group, const void* input, void* output, uint64_t count,
                                 weft_type type, weft_op op, uint32_t root);
WEFT_API weft_status weft_gather(weft_group* group, const void* input, void* output, uint64_t count,
                                 weft_type type, uint32_t root);
WEFT_API weft_status weft_scatter(weft_group* group, const void* input, void* output,
                                  uint64_t count, weft_type type, uint32_t root);
WEFT_API weft_status weft_all_to_all(weft_group* group, const void* input, void* output,
                                     uint64_t count, weft_type type);
WEFT_API weft_status weft_all_to_allv(weft_group* group, const void* input,
                                      const uint64_t* send_counts, void* output,
                                      const uint64_t* receive_counts, weft_type type);
WEFT_API weft_status weft_barrier(weft_group* group);
WEFT_API weft_status weft_send(weft_group* group, const void* data, uint64_t count, weft_type type,
                               uint32_t to);
WEFT_API weft_status weft_receive(weft_group* group, void* data, uint64_t count, weft_type type,
                                  uint32_t from);

/* ---- gradients --------------------------------------------------------------------------- */

typedef struct weft_tensor {
  size_t struct_size;
  const char* name;
  float* data; /* NULL where `memory` says where they are */
  uint64_t count;
  uint32_t layer; /* whose forward needs the sum first */
  void* memory;   /* elements of any type; NULL: `data` */
  weft_type type; /* 0: WEFT_FLOAT32; or WEFT_FLOAT64, WEFT_FLOAT16, WEFT_BFLOAT16 */
} weft_tensor;

/* Registers the tensors, in forward order, the same on all ranks. One exchange a group. */
WEFT_API weft_status weft_exchange_create(weft_group* group, const weft_tensor* tensors,
                                          size_t count, weft_exchange** exchange);
/* The gradient of `tensor` (its place in the list) in `step` (0, 1, 2, ...) is in its memory, which
 * belongs to the exchange until the wait for it returns. Then it holds the sum over all ranks. */
WEFT_API weft_status weft_exchange_ready(weft_exchange* exchange, uint32_t tensor, uint64_t step);
/* The same for a tensor on which this rank has nothing to say in this step: it counts as zeros, to
 * which its memory is set. */
WEFT_API weft_status weft_exchange_ready_without(weft_exchange* exchange, uint32_t tensor,
                                                 uint64_t step);
WEFT_API weft_status weft_exchange_wait(weft_exchange* exchange, uint32_t tensor, uint64_t step);
WEFT_API weft_status weft_exchange_wait_all(weft_exchange* exchange, uint64_t step);
/* Another plan (a file or a preset) from the next step on. All ranks call it between the same two
 * steps, when all sums of the step before have been waited for. What one rank cannot take, or what
 * differs between them, is refused on all in the same words, and the plan before goes on. */
WEFT_API weft_status weft_exchange_change_plan(weft_exchange* exchange, const char* plan);
WEFT_API void weft_exchange_free(weft_exchange* exchange);

/* ---- marks ------------------------------------------------------------------------------- */

/* What the program says of its own work, for the trace, as weft/mark.h does. With recording off
 * all succeed and do nothing. A mark that makes no sense is refused, and counted in the trace. */
typedef enum weft_mark {
  WEFT_MARK_FORWARD = 1, /* of one layer, as the next */
  WEFT_MARK_BACKWARD = 2,
  WEFT_MARK_UPDATE = 3, /* of one layer, or of all */
  WEFT_MARK_DATA_LOADING = 4,
  WEFT_MARK_HOST = 5,
  WEFT_MARK_WIDTH = 0x7fffffff
} weft_mark;
#define WEFT_NO_LAYER 0xffffffffu

/* The layers, in forward order, before the first span and before the exchange is made, whose
 * tensors otherwise say how many there are. `model` may be NULL. */
WEFT_API weft_status weft_mark_layers(weft_group* group, const char* model,
                                      const char* const* layers, size_t count);
/* Ends the iteration under way and begins this one. Numbers rise, and are those of the exchange's
 * steps. */
WEFT_API weft_status weft_mark_iteration(weft_group* group, uint64_t number);
WEFT_API weft_status weft_mark_iteration_end(weft_group* group);
/* A span begins; `span` is the number by which it is ended, in any thread. `name` may be NULL. */
WEFT_API weft_status weft_mark_begin(weft_group* group, weft_mark what, uint32_t layer,
                                     const char* name, uint64_t* span);
WEFT_API weft_status weft_mark_end(weft_group* group, uint64_t span);
/* There are so many bytes now of the memory that `name` names. */
WEFT_API weft_status weft_mark_memory(weft_group* group, const char* name, uint64_t bytes);

/* ---- failure ----------------------------------------------------------------------------- */

/* Ends the group for everyone, with this reason. All waits end. */
WEFT_API weft_status weft_abort(weft_group* group, const char* reason);
/* Why the group is unusable: `*code` is WEFT_OK, and `*text` NULL, while it is not. Either may be
 * NULL if it is not wanted; the text is freed with weft_text_free. */
WEFT_API weft_status weft_failure(const weft_group* group, weft_status* code, char** text);
/* The rank that the failure is blamed on, -1 if there is none. */
WEFT_API weft_status weft_culprit(const weft_group* group, int64_t* rank);
/* After a failure: the ranks that are left form a new group, in their old order, if there are at
 * least `least` of them (0: more than half of the old group, so that two groups can never form).
 * All survivors call it; once there are enough, others are waited for until `settle_ms` (0: 5 s)
 * have passed. The old group stays as it is, failed, until it is freed. */
WEFT_API weft_status weft_rebuild(weft_group* group, uint64_t settle_ms, uint32_t least,
                                  weft_group** rebuilt);
/* Operations in flight, lanes and their counts, who waits for whom: one JSON object, freed with
 * weft_text_free. */
WEFT_API weft_status weft_group_status(weft_group* group, char** json);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_H */
