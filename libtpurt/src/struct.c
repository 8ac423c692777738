/* SPDX-License-Identifier: MIT */
/* struct_size: an older caller and a newer library, or the other way round. */
#include <string.h>

#include "internal.h"

int rt_struct_in(void *ours, uint32_t our_bytes, const void *theirs, uint32_t minimum,
                 const char *what)
{
    const unsigned char *bytes = theirs;
    uint32_t size;

    if (!theirs)
        return rt_fail(TPURT_ERROR_INVALID, "%s is NULL", what);
    memcpy(&size, theirs, sizeof(size));
    if (size < minimum || size > 4096)
        return rt_fail(TPURT_ERROR_INVALID, "%s: struct_size %u is not %u..4096", what, size,
                       minimum);
    for (uint32_t i = our_bytes; i < size; i++)
        if (bytes[i])
            return rt_fail(TPURT_ERROR_UNSUPPORTED,
                           "%s: byte %u is set, but this library knows only %u bytes", what, i,
                           our_bytes);
    memset(ours, 0, our_bytes);
    memcpy(ours, theirs, size < our_bytes ? size : our_bytes);
    return TPURT_OK;
}

int rt_struct_out(void *theirs, const void *ours, uint32_t our_bytes, uint32_t minimum,
                  const char *what)
{
    uint32_t size;

    if (!theirs)
        return rt_fail(TPURT_ERROR_INVALID, "%s is NULL", what);
    memcpy(&size, theirs, sizeof(size));
    if (size < minimum || size > 4096)
        return rt_fail(TPURT_ERROR_INVALID, "%s: struct_size %u is not %u..4096", what, size,
                       minimum);
    memset(theirs, 0, size);
    memcpy(theirs, ours, size < our_bytes ? size : our_bytes);
    memcpy(theirs, &size, sizeof(size));
    return TPURT_OK;
}
