/* SPDX-License-Identifier: MIT */
#ifndef VTPU_INIT_H
#define VTPU_INIT_H

#include <stdbool.h>
#include <stddef.h>

/* util.c: the console is the only place to speak to. */
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
void die(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
char *read_file(const char *path);              /* NUL-terminated, or NULL */
char *kernel_argument(const char *name);        /* value of NAME=..., or NULL */
bool load_modules(const char *dir);             /* in the order of DIR/order */

/* early.c: from the initramfs to the real root. */
void mount_kernel_filesystems(void);
void resume_from_disk(void);
void enter_root(void);

/* net.c: QEMU's user network, whose addresses are fixed. */
void bring_up_network(void);

/* run.c: the processes that init keeps. */
void start_agent(void);
void start_command(void);
void load_environment(void);
void supervise(void) __attribute__((noreturn));
void power_off(void) __attribute__((noreturn));

#endif
