/* Between the test in C and the one that runs it. */
#ifndef WEFT_PLAIN_TEST_H
#define WEFT_PLAIN_TEST_H

#ifdef __cplusplus
extern "C" {
#endif

/* Joins a group of one and uses it. Returns 0, or the line of what went wrong. */
int plain_c_program(void);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_PLAIN_TEST_H */
