/* SPDX-License-Identifier: MIT */
#include <stdlib.h>
#include <string.h>

#include "state.h"

static bool grow(VtpuStream *s, size_t size)
{
    size_t room = s->room;

    if (size <= room - s->at) {
        return true;
    }
    while (size > room - s->at) {
        if (room > SIZE_MAX / 4) {
            return false;
        }
        room = room ? 2 * room : 65536;
    }
    uint8_t *bytes = realloc(s->bytes, room);
    if (!bytes) {
        return false;
    }
    s->bytes = bytes;
    s->room = room;
    return true;
}

void vtpu_stream_bytes(VtpuStream *s, void *data, size_t size)
{
    if (s->loading) {
        if (s->error || size > s->end - s->at) {
            s->error = s->error ? s->error : "it ends early";
            memset(data, 0, size);
            return;
        }
        memcpy(data, s->bytes + s->at, size);
        s->at += size;
        return;
    }
    if (s->error || !grow(s, size)) {
        s->error = s->error ? s->error : "out of memory";
        return;
    }
    memcpy(s->bytes + s->at, data, size);
    s->at += size;
}

void vtpu_stream_bool(VtpuStream *s, bool *value)
{
    uint8_t byte = *value;

    VTPU_STREAM(s, byte);
    *value = byte;
    vtpu_stream_check(s, byte <= 1, "a flag is neither 0 nor 1");
}

bool vtpu_stream_check(VtpuStream *s, bool ok, const char *error)
{
    if (!ok && s->loading && !s->error) {
        s->error = error;
    }
    return s->error == NULL;
}
