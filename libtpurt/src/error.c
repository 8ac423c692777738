/* SPDX-License-Identifier: MIT */
#include "error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <vtpu_hw.h>

static _Thread_local char message[512];

int rt_fail(int status, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    return status;
}

static int status_of_errno(int number)
{
    switch (number) {
    case ENOMEM:
    case ENOSPC:
        return TPURT_ERROR_OUT_OF_MEMORY;
    case ENODEV:
    case ENXIO:
        return TPURT_ERROR_LOST;
    case EACCES:
    case EPERM:
        return TPURT_ERROR_PERMISSION;
    case ENOSYS:
    case ENOTTY:
    case EOPNOTSUPP:
        return TPURT_ERROR_UNSUPPORTED;
    case EINVAL:
    case ENOENT:
        return TPURT_ERROR_INVALID;
    case ETIME:
    case ETIMEDOUT:
        return TPURT_ERROR_TIMEOUT;
    default:
        return TPURT_ERROR_IO;
    }
}

int rt_fail_errno(int number, const char *format, ...)
{
    char what[384];
    va_list args;

    va_start(args, format);
    vsnprintf(what, sizeof(what), format, args);
    va_end(args);
    return rt_fail(status_of_errno(number), "%s: %s", what, strerror(number));
}

uint32_t tpurt_version(void)
{
    return TPURT_VERSION_MAJOR << 16 | TPURT_VERSION_MINOR;
}

const char *tpurt_last_error(void)
{
    return message;
}

const char *tpurt_status_name(int status)
{
    switch (status) {
    case TPURT_OK: return "ok";
    case TPURT_ERROR_INVALID: return "invalid";
    case TPURT_ERROR_NO_DEVICE: return "no device";
    case TPURT_ERROR_OUT_OF_MEMORY: return "out of memory";
    case TPURT_ERROR_UNSUPPORTED: return "unsupported";
    case TPURT_ERROR_BAD_EXECUTABLE: return "bad executable";
    case TPURT_ERROR_TIMEOUT: return "timeout";
    case TPURT_ERROR_FAULT: return "fault";
    case TPURT_ERROR_HUNG: return "hung";
    case TPURT_ERROR_LOST: return "lost";
    case TPURT_ERROR_CANCELLED: return "cancelled";
    case TPURT_ERROR_IO: return "io";
    case TPURT_ERROR_PERMISSION: return "permission";
    default: return "unknown";
    }
}

const char *tpurt_fault_name(uint32_t cause)
{
    static const char *const names[] = {
        [VTPU_FAULT_NONE] = "none",
        [VTPU_FAULT_ILLEGAL_INSTRUCTION] = "illegal instruction",
        [VTPU_FAULT_BAD_OPERAND] = "bad operand",
        [VTPU_FAULT_UNMAPPED] = "unmapped",
        [VTPU_FAULT_PROTECTION] = "protection",
        [VTPU_FAULT_BUS] = "bus",
        [VTPU_FAULT_VMEM_RANGE] = "vmem range",
        [VTPU_FAULT_INDEX_RANGE] = "index range",
        [VTPU_FAULT_TRAP] = "trap",
        [VTPU_FAULT_BAD_COMMAND] = "bad command",
        [VTPU_FAULT_BAD_RING] = "bad ring",
        [VTPU_FAULT_DEADLOCK] = "deadlock",
        [VTPU_FAULT_PC_RANGE] = "pc range",
        [VTPU_FAULT_BAD_PAGE_TABLE] = "bad page table",
        [VTPU_FAULT_BAD_CONTEXT] = "bad context",
        [VTPU_FAULT_ECC] = "uncorrectable memory error",
    };

    return cause < sizeof(names) / sizeof(*names) && names[cause] ? names[cause] : "unknown";
}
