/* SPDX-License-Identifier: MIT */
/*
 * tpurt: the vTPU's user-mode runtime.
 *
 * A device has one address space. Buffers are placed in it, executables are
 * loaded into it, queues run commands in it. A fence is a point on a queue's
 * timeline: the pair (queue, point).
 *
 * Results    Every fallible function returns TPURT_OK or a negative status, and
 *            writes its out-parameters only on success, unless it says
 *            otherwise. After a failure, tpurt_last_error() explains it.
 * Ownership  *_create, *_load and *_open return one reference, to be given back
 *            with *_release; *_retain adds one. An object keeps those it needs
 *            alive (a buffer its device), so release in any order. Releasing
 *            NULL does nothing. The last *_release may wait for the device.
 * Threads    Every function may be called from any thread at any time, except
 *            that a tpurt_commands is recorded by one thread at a time.
 * Structures The caller sets struct_size to the sizeof it was compiled with.
 *            Fields that the library does not know must be zero; fields that
 *            the caller does not know take their default, zero.
 * Times      Timeouts are nanoseconds from now: 0 polls, negative never ends.
 */
#ifndef TPURT_H
#define TPURT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TPURT_API __attribute__((visibility("default")))

#define TPURT_VERSION_MAJOR 1
#define TPURT_VERSION_MINOR 0

typedef struct tpurt_device tpurt_device;
typedef struct tpurt_buffer tpurt_buffer;
typedef struct tpurt_executable tpurt_executable;
typedef struct tpurt_queue tpurt_queue;
typedef struct tpurt_commands tpurt_commands;

/* ---- Status ---- */

enum tpurt_status {
    TPURT_OK = 0,
    TPURT_ERROR_INVALID = -1,        /* an argument is wrong */
    TPURT_ERROR_NO_DEVICE = -2,      /* no such device, or it cannot be opened */
    TPURT_ERROR_OUT_OF_MEMORY = -3,  /* host memory, HBM, addresses or queues */
    TPURT_ERROR_UNSUPPORTED = -4,    /* this device, driver or kernel lacks it */
    TPURT_ERROR_BAD_EXECUTABLE = -5, /* the file is not one this device can run */
    TPURT_ERROR_TIMEOUT = -6,        /* the caller's timeout passed; work goes on */
    TPURT_ERROR_FAULT = -7,          /* the device refused an access or instruction */
    TPURT_ERROR_HUNG = -8,           /* a job passed its queue's time limit */
    TPURT_ERROR_LOST = -9,           /* the device was reset or is gone */
    TPURT_ERROR_CANCELLED = -10,     /* queued behind a job that failed */
    TPURT_ERROR_IO = -11,            /* the system refused: see the message */
    TPURT_ERROR_PERMISSION = -12     /* the process lacks a right */
};

/* The library's version, major in the upper 16 bits. */
TPURT_API uint32_t tpurt_version(void);
/* A status as a word ("fault"); "unknown" for any other number. Static. */
TPURT_API const char *tpurt_status_name(int status);
/* A tpurt_queue_state's fault_cause as words ("unmapped"). Static. */
TPURT_API const char *tpurt_fault_name(uint32_t cause);
/*
 * The message of this thread's last failed call, naming the input and the
 * limit; empty when none failed yet. Valid until this thread's next failure.
 */
TPURT_API const char *tpurt_last_error(void);

/* ---- Device ---- */

typedef struct tpurt_device_desc {
    uint32_t struct_size;
    uint32_t core_threads;    /* in-process machine: compute threads; 0: all processors */
    uint64_t core_hbm_bytes;  /* in-process machine: HBM, a power of two; 0: 2 GiB */
    const char *core_isa;     /* in-process machine: "scalar", "avx2", ...; NULL: best */
} tpurt_device_desc;

typedef struct tpurt_device_info {
    uint32_t struct_size;
    uint32_t hw_version;      /* major in the upper 16 bits */
    uint32_t isa_version;
    uint32_t num_queues;      /* hardware queues */
    uint64_t hbm_bytes;
    uint64_t va_start;        /* device addresses: first usable */
    uint64_t va_end;          /* one past the last */
    uint32_t page_bytes;
    uint32_t vmem_bytes;
    char backend[16];         /* "drm" or "core" */
    char name[64];            /* the device file, or the vector path of the machine */
} tpurt_device_info;

typedef struct tpurt_device_memory {
    uint32_t struct_size;
    uint32_t reserved;
    uint64_t hbm_bytes;
    uint64_t hbm_used;        /* by everyone, page tables included */
    uint64_t client_hbm;      /* by this handle's live buffers */
    uint64_t client_host;
} tpurt_device_memory;

typedef struct tpurt_device_stats {
    uint32_t struct_size;
    uint32_t has_counters;    /* non-zero: the four device counters below are known */
    uint64_t device_resets;
    uint64_t queue_resets;
    uint64_t jobs_submitted;  /* through this handle */
    uint64_t commands_submitted;
    uint64_t programs;        /* RUN commands completed since the device's reset */
    uint64_t instructions;
    uint64_t busy_ns;
    uint64_t hbm_streamed;    /* bytes the engines read from HBM */
} tpurt_device_stats;

/*
 * Opens "drm:/dev/accel/accel0" (the kernel driver) or "core" (the machine in
 * this process; the library must be built with it). NULL: the environment's
 * VTPU_DEVICE, else the first vTPU under /dev/accel, else "core". desc may be
 * NULL. Two openings share nothing.
 */
TPURT_API int tpurt_device_open(const char *name, const tpurt_device_desc *desc,
                                tpurt_device **device);
TPURT_API tpurt_device *tpurt_device_retain(tpurt_device *device);
TPURT_API void tpurt_device_release(tpurt_device *device);
TPURT_API int tpurt_device_get_info(tpurt_device *device, tpurt_device_info *info);
TPURT_API int tpurt_device_get_memory(tpurt_device *device, tpurt_device_memory *memory);
TPURT_API int tpurt_device_get_stats(tpurt_device *device, tpurt_device_stats *stats);

/* ---- Buffer ---- */

enum tpurt_buffer_flag {
    TPURT_BUFFER_HBM = 1,       /* in device memory; else in the host's */
    TPURT_BUFFER_READ_ONLY = 2, /* programs may not write it */
    TPURT_BUFFER_EXECUTABLE = 4 /* programs may be run from it; implies READ_ONLY */
};

typedef struct tpurt_buffer_desc {
    uint32_t struct_size;
    uint32_t flags;           /* enum tpurt_buffer_flag */
    uint64_t bytes;           /* not 0; rounded up to pages */
    uint64_t va;              /* a page-aligned device address; 0: the library chooses */
    const char *name;         /* for messages, copied; may be NULL */
} tpurt_buffer_desc;

typedef struct tpurt_buffer_info {
    uint32_t struct_size;
    uint32_t flags;
    uint64_t bytes;           /* as asked for */
    uint64_t allocated;       /* as rounded */
    uint64_t va;              /* device address */
    const char *name;         /* lives as long as the buffer; never NULL */
} tpurt_buffer_info;

/* Creates a zeroed buffer and places it in the device's address space. */
TPURT_API int tpurt_buffer_create(tpurt_device *device, const tpurt_buffer_desc *desc,
                                  tpurt_buffer **buffer);
/*
 * Makes a buffer of memory that the caller has: desc->bytes from data on, both
 * multiples of pages, without the flag HBM. It stays the caller's, who keeps it
 * until the last release; until then it cannot be swapped out, and counts
 * against RLIMIT_MEMLOCK. READ_ONLY suffices for memory that cannot be written.
 */
TPURT_API int tpurt_buffer_import(tpurt_device *device, const tpurt_buffer_desc *desc,
                                  void *data, tpurt_buffer **buffer);
TPURT_API tpurt_buffer *tpurt_buffer_retain(tpurt_buffer *buffer);
/*
 * The last release takes the buffer out of the address space: unfinished work
 * that still uses it faults its own queue.
 */
TPURT_API void tpurt_buffer_release(tpurt_buffer *buffer);
TPURT_API int tpurt_buffer_get_info(tpurt_buffer *buffer, tpurt_buffer_info *info);
/* The buffer in host memory, readable and writable as long as it lives. */
TPURT_API int tpurt_buffer_map(tpurt_buffer *buffer, void **data);
/* Copy through the mapping, after a check of the range. No order with queues. */
TPURT_API int tpurt_buffer_write(tpurt_buffer *buffer, uint64_t offset, const void *data,
                                 uint64_t bytes);
TPURT_API int tpurt_buffer_read(tpurt_buffer *buffer, uint64_t offset, void *data,
                                uint64_t bytes);
/*
 * Reads a file's bytes [fd_offset, +bytes) straight into the buffer; the file
 * position stays. Fails, with part of the bytes written, when the file ends early.
 */
TPURT_API int tpurt_buffer_read_fd(tpurt_buffer *buffer, uint64_t offset, int fd,
                                   uint64_t fd_offset, uint64_t bytes);

/* ---- Executable ---- */

#define TPURT_NOTE_METADATA 0x21  /* JSON */
#define TPURT_NOTE_CACHE_KEY 0x22 /* 32 bytes */

typedef struct tpurt_kernel_info {
    uint32_t struct_size;
    uint32_t num_args;        /* 64-bit words */
    uint64_t va;              /* of the first instruction, where the device fetches it */
    uint32_t text_offset;     /* of the first instruction in .text */
    uint32_t code_bytes;
    const char *name;         /* lives as long as the executable */
} tpurt_kernel_info;

/*
 * Checks an ELF image (docs/executable-format.md) without a device. name is
 * for messages and may be NULL.
 */
TPURT_API int tpurt_executable_check(const void *image, uint64_t bytes, const char *name);
/* Checks an image, copies it, and puts its code into executable HBM. */
TPURT_API int tpurt_executable_load(tpurt_device *device, const void *image, uint64_t bytes,
                                    const char *name, tpurt_executable **executable);
TPURT_API tpurt_executable *tpurt_executable_retain(tpurt_executable *executable);
TPURT_API void tpurt_executable_release(tpurt_executable *executable);
TPURT_API uint32_t tpurt_executable_num_kernels(tpurt_executable *executable);
TPURT_API int tpurt_executable_get_kernel(tpurt_executable *executable, uint32_t index,
                                          tpurt_kernel_info *info);
TPURT_API int tpurt_executable_find_kernel(tpurt_executable *executable, const char *name,
                                           uint32_t *index);
/* A note or a section of the image, in place: lives as long as the executable. */
TPURT_API int tpurt_executable_get_note(tpurt_executable *executable, uint32_t type,
                                        const void **data, uint64_t *bytes);
TPURT_API int tpurt_executable_get_section(tpurt_executable *executable, const char *name,
                                           const void **data, uint64_t *bytes);

/* ---- Queue ---- */

enum tpurt_priority {
    TPURT_PRIORITY_LOW = 0,
    TPURT_PRIORITY_NORMAL = 1,
    TPURT_PRIORITY_HIGH = 2   /* may need a privilege */
};

typedef struct tpurt_queue_desc {
    uint32_t struct_size;
    uint32_t priority;        /* enum tpurt_priority */
    uint32_t timeout_ms;      /* a job's time limit; 0: the default, 10 s */
    uint32_t reserved;
} tpurt_queue_desc;

typedef struct tpurt_queue_state {
    uint32_t struct_size;
    int32_t status;           /* TPURT_OK, or TPURT_ERROR_FAULT, _HUNG, _LOST */
    uint32_t fault_cause;     /* the hardware's enum fault; 0: none */
    uint32_t fault_access;    /* 1 read, 2 write, 3 execute; 0: no access */
    uint64_t fault_address;
    uint32_t fault_pc;        /* byte offset in the kernel; ~0: none */
    uint32_t fault_cookie;    /* of the guilty command */
    uint64_t submitted;       /* the last point handed out */
    uint64_t completed;       /* every point up to here succeeded */
} tpurt_queue_state;

TPURT_API int tpurt_queue_create(tpurt_device *device, const tpurt_queue_desc *desc,
                                 tpurt_queue **queue);
TPURT_API tpurt_queue *tpurt_queue_retain(tpurt_queue *queue);
/* The last release cancels what has not run. */
TPURT_API void tpurt_queue_release(tpurt_queue *queue);
TPURT_API int tpurt_queue_get_state(tpurt_queue *queue, tpurt_queue_state *state);
/*
 * After a failure: makes the queue usable again. Its points go on counting;
 * those that failed keep their error. Does nothing to a sound queue.
 */
TPURT_API int tpurt_queue_recover(tpurt_queue *queue);
/* One-command jobs. *point is the job's point on the queue's timeline. */
TPURT_API int tpurt_queue_nop(tpurt_queue *queue, uint64_t *point);
TPURT_API int tpurt_queue_copy(tpurt_queue *queue, uint64_t dst_va, uint64_t src_va,
                               uint64_t bytes, uint64_t *point);
TPURT_API int tpurt_queue_fill(tpurt_queue *queue, uint64_t dst_va, uint64_t bytes,
                               uint32_t pattern, uint64_t *point);

/* ---- Recorded commands ---- */

#define TPURT_MAX_COMMANDS 64     /* in one recording */
#define TPURT_MAX_WAITS 32        /* fences a submission may wait for */

/* A job for this queue, recorded once and submitted any number of times. */
TPURT_API int tpurt_commands_create(tpurt_queue *queue, tpurt_commands **commands);
TPURT_API tpurt_commands *tpurt_commands_retain(tpurt_commands *commands);
/* The last release waits until the device no longer uses the recording. */
TPURT_API void tpurt_commands_release(tpurt_commands *commands);
/* Empties the recording, after waiting as release does. */
TPURT_API int tpurt_commands_reset(tpurt_commands *commands);
/*
 * Runs a kernel with these argument words (addresses or numbers), copied now.
 * The executable is kept alive; what the addresses lead to is the caller's.
 */
TPURT_API int tpurt_commands_run(tpurt_commands *commands, tpurt_executable *executable,
                                 uint32_t kernel, const uint64_t *args, uint32_t num_args);
TPURT_API int tpurt_commands_copy(tpurt_commands *commands, uint64_t dst_va, uint64_t src_va,
                                  uint64_t bytes);
TPURT_API int tpurt_commands_fill(tpurt_commands *commands, uint64_t dst_va, uint64_t bytes,
                                  uint32_t pattern);
/* Holds the queue until the 64-bit word at va is >= value. */
TPURT_API int tpurt_commands_wait(tpurt_commands *commands, uint64_t va, uint64_t value);
TPURT_API int tpurt_commands_signal(tpurt_commands *commands, uint64_t va, uint64_t value);
/* Stores the device's nanosecond clock at va: the means to profile a job. */
TPURT_API int tpurt_commands_timestamp(tpurt_commands *commands, uint64_t va);

typedef struct tpurt_fence {  /* a point on a queue's timeline; owns nothing */
    tpurt_queue *queue;
    uint64_t point;
} tpurt_fence;

/*
 * Submits a recording as one job. It starts after the queue's earlier jobs and
 * after the num_waits fences at waits (of this device; that they failed does
 * not stop it). The cookie goes with every command, into traces and faults.
 * Fails with the queue's status when the queue has failed.
 */
TPURT_API int tpurt_commands_submit(tpurt_commands *commands, uint32_t cookie,
                                    const tpurt_fence *waits, uint32_t num_waits,
                                    uint64_t *point);

/* ---- Fence ---- */

/*
 * Waits for a point and returns how its job ended: TPURT_OK,
 * TPURT_ERROR_FAULT, _HUNG or _LOST for the guilty job, _CANCELLED for the
 * jobs behind it; TPURT_ERROR_TIMEOUT when it has not ended. Point 0 is past.
 */
TPURT_API int tpurt_fence_wait(tpurt_queue *queue, uint64_t point, int64_t timeout_ns);
/* The queue's state as of the point, with the fault even after a recover. */
TPURT_API int tpurt_fence_get_state(tpurt_queue *queue, uint64_t point,
                                    tpurt_queue_state *state);
/*
 * Adds 1 to an eventfd when the point's job has ended, at once if it has. The
 * descriptor stays the caller's, who may close it at any time.
 */
TPURT_API int tpurt_fence_notify(tpurt_queue *queue, uint64_t point, int eventfd);

#ifdef __cplusplus
}
#endif

#endif /* TPURT_H */
