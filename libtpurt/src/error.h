/* SPDX-License-Identifier: MIT */
/* Failing with a message: every failure path of the library ends here. */
#ifndef RT_ERROR_H
#define RT_ERROR_H

#include <tpurt.h>

/* Records the calling thread's message and returns status. */
int rt_fail(int status, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The same, with ": " and errno's text added; the status comes from the number. */
int rt_fail_errno(int number, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
