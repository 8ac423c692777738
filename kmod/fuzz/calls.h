/* SPDX-License-Identifier: MIT */
/*
 * A program of calls, as bytes.
 *
 * Every choice is made by bytes of the input, so that one input always makes
 * the same calls, and a change of a byte changes one of them. Zero bytes choose
 * what is valid: all-zero arguments after a call's number make it succeed
 * whenever what it needs was made before, and zeroes after them are no call. When
 * the bytes end, the program does.
 */
#ifndef VTPU_FUZZ_CALLS_H
#define VTPU_FUZZ_CALLS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CALLS_NODE "/dev/accel/accel0"
#define PROGRAM_MAX 4096

/* The first byte of an input. */
#define PROGRAM_PARALLEL 1	/* the second half runs on two threads at once */
#define PROGRAM_KILLED 2	/* in a process that is killed in the middle */

/*
 * The state that calls share: files, handles, mappings. One program at a time;
 * its threads may race on purpose.
 */
bool calls_begin(void);		/* false, with errno: the device cannot be opened */
void calls_run(const uint8_t *data, size_t size);
void calls_end(void);		/* closes and unmaps everything */

extern const unsigned int calls_count;	/* numbers of calls: byte % calls_count */
const char *calls_name(unsigned int number);
/* Whether it ever did what it is for, in this process. */
bool calls_worked(unsigned int number);

#endif
