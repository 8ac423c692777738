/* SPDX-License-Identifier: MIT */
/*
 * A stream of bytes that the same code writes and reads: each call names a
 * variable, which is put into the stream or filled from it. So what is saved
 * and what is loaded cannot differ. What is read is not trusted: whoever fills
 * a variable checks it (vtpu_stream_check) before it is used.
 *
 * Errors: the first one stays; after it nothing is written, and what is read
 * is zero. Little endian, no padding. One thread at a time.
 */
#ifndef VTPU_STATE_H
#define VTPU_STATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct VtpuCore;

typedef struct VtpuStream {
    bool loading;
    uint8_t *bytes; /* to load: the caller's; to save: malloc()ed */
    size_t end;     /* of what there is, or of the part in hand */
    size_t at;
    size_t room;      /* to save: allocated bytes */
    const char *error; /* static, or NULL */
} VtpuStream;

void vtpu_stream_bytes(VtpuStream *s, void *data, size_t size);
/* Any variable of 1 to 8 bytes. */
#define VTPU_STREAM(s, variable) vtpu_stream_bytes(s, &(variable), sizeof(variable))
void vtpu_stream_bool(VtpuStream *s, bool *value);
/* Returns whether all is well so far; what is false while loading is `error`. */
bool vtpu_stream_check(VtpuStream *s, bool ok, const char *error);

/* A part of the machine's state; `version` is what the stream has of it. Lock held. */
typedef void VtpuStatePart(struct VtpuCore *core, VtpuStream *s, uint32_t version);
VtpuStatePart vtpu_state_visit_timing; /* state_timing.c */

#endif
