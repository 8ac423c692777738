/* SPDX-License-Identifier: MIT */
/*
 * A recording keeps its programs' argument words in one small host buffer, a
 * slot a command, written at recording: a submission then writes nothing.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "executable.h"
#include "queue.h"

#define SLOT_BYTES (VTPU_MAX_ARGS * sizeof(uint64_t))

struct tpurt_commands {
    atomic_uint refs;
    tpurt_queue *queue;
    tpurt_buffer *args; /* from the first RUN on */
    uint64_t args_va;
    _Atomic uint64_t last_point;
    uint32_t count;
    struct drm_vtpu_cmd commands[TPURT_MAX_COMMANDS];
    tpurt_executable *executables[TPURT_MAX_COMMANDS];
};

int tpurt_commands_create(tpurt_queue *queue, tpurt_commands **commands)
{
    tpurt_commands *cmds;

    if (!queue || !commands)
        return rt_fail(TPURT_ERROR_INVALID, "queue or commands is NULL");
    cmds = calloc(1, sizeof(*cmds));
    if (!cmds)
        return rt_fail(TPURT_ERROR_OUT_OF_MEMORY, "no host memory for a recording");
    atomic_init(&cmds->refs, 1);
    cmds->queue = tpurt_queue_retain(queue);
    *commands = cmds;
    return TPURT_OK;
}

tpurt_commands *tpurt_commands_retain(tpurt_commands *commands)
{
    return RT_RETAIN(commands);
}

/* However the last job ended, the device is done with the slots. */
static void settle(tpurt_commands *commands)
{
    tpurt_fence_wait(commands->queue, atomic_load(&commands->last_point), -1);
    for (uint32_t i = 0; i < commands->count; i++)
        tpurt_executable_release(commands->executables[i]);
    commands->count = 0;
}

void tpurt_commands_release(tpurt_commands *commands)
{
    if (!RT_DROP(commands))
        return;
    settle(commands);
    tpurt_buffer_release(commands->args);
    tpurt_queue_release(commands->queue);
    free(commands);
}

int tpurt_commands_reset(tpurt_commands *commands)
{
    settle(commands);
    return TPURT_OK;
}

static int record(tpurt_commands *commands, struct drm_vtpu_cmd command,
                  tpurt_executable *executable)
{
    if (commands->count == TPURT_MAX_COMMANDS)
        return rt_fail(TPURT_ERROR_INVALID, "a recording has at most %u commands",
                       TPURT_MAX_COMMANDS);
    commands->commands[commands->count] = command;
    commands->executables[commands->count] = tpurt_executable_retain(executable);
    commands->count++;
    return TPURT_OK;
}

static int need_args(tpurt_commands *commands)
{
    tpurt_buffer_desc desc = {
        .struct_size = sizeof(desc),
        .flags = TPURT_BUFFER_READ_ONLY,
        .bytes = TPURT_MAX_COMMANDS * SLOT_BYTES,
        .name = "arguments",
    };
    tpurt_buffer_info info = { .struct_size = sizeof(info) };
    int status;

    if (commands->args)
        return TPURT_OK;
    status = tpurt_buffer_create(commands->queue->device, &desc, &commands->args);
    if (!status)
        status = tpurt_buffer_get_info(commands->args, &info);
    commands->args_va = info.va;
    return status;
}

int tpurt_commands_run(tpurt_commands *commands, tpurt_executable *executable, uint32_t kernel,
                       const uint64_t *args, uint32_t num_args)
{
    tpurt_kernel_info info = { .struct_size = sizeof(info) };
    struct drm_vtpu_cmd command = { .op = DRM_VTPU_OP_RUN };
    uint32_t slot = commands->count * (uint32_t)SLOT_BYTES;
    int status = tpurt_executable_get_kernel(executable, kernel, &info);

    if (status)
        return status;
    if (executable->code->device != commands->queue->device)
        return rt_fail(TPURT_ERROR_INVALID, "run: executable \"%s\" is loaded on another device",
                       executable->name);
    if (num_args != info.num_args)
        return rt_fail(TPURT_ERROR_INVALID, "run: kernel \"%s\" takes %u arguments, not %u",
                       info.name, info.num_args, num_args);
    status = need_args(commands);
    if (status)
        return status;
    if (commands->count < TPURT_MAX_COMMANDS) {
        status = tpurt_buffer_write(commands->args, slot, args, num_args * sizeof(*args));
        if (status)
            return status;
    }
    /* code_bytes, entry and num_args are 32-bit fields of the ring entry. */
    command.payload[0] = info.va;
    command.payload[1] = info.code_bytes;
    command.payload[2] = commands->args_va + slot;
    command.payload[3] = num_args;
    return record(commands, command, executable);
}

int tpurt_commands_copy(tpurt_commands *commands, uint64_t dst_va, uint64_t src_va, uint64_t bytes)
{
    return record(commands,
                  (struct drm_vtpu_cmd){ .op = DRM_VTPU_OP_COPY, .payload = { dst_va, src_va, bytes } },
                  NULL);
}

int tpurt_commands_fill(tpurt_commands *commands, uint64_t dst_va, uint64_t bytes, uint32_t pattern)
{
    if (bytes % 4)
        return rt_fail(TPURT_ERROR_INVALID, "fill: %" PRIu64 " bytes is no multiple of 4", bytes);
    return record(commands,
                  (struct drm_vtpu_cmd){ .op = DRM_VTPU_OP_FILL, .payload = { dst_va, bytes, pattern } },
                  NULL);
}

int tpurt_commands_wait(tpurt_commands *commands, uint64_t va, uint64_t value)
{
    return record(commands,
                  (struct drm_vtpu_cmd){ .op = DRM_VTPU_OP_WAIT, .payload = { va, value } }, NULL);
}

int tpurt_commands_signal(tpurt_commands *commands, uint64_t va, uint64_t value)
{
    return record(commands,
                  (struct drm_vtpu_cmd){ .op = DRM_VTPU_OP_SIGNAL, .payload = { va, value } }, NULL);
}

int tpurt_commands_timestamp(tpurt_commands *commands, uint64_t va)
{
    return record(commands,
                  (struct drm_vtpu_cmd){ .op = DRM_VTPU_OP_TIMESTAMP, .payload = { va } }, NULL);
}

int tpurt_commands_submit(tpurt_commands *commands, uint32_t cookie, const tpurt_fence *waits,
                          uint32_t num_waits, uint64_t *point)
{
    struct drm_vtpu_cmd stamped[TPURT_MAX_COMMANDS]; /* the recording itself may be in use */
    uint64_t last;
    int status;

    if (!commands->count)
        return rt_fail(TPURT_ERROR_INVALID, "submit: the recording is empty");
    memcpy(stamped, commands->commands, commands->count * sizeof(*stamped));
    for (uint32_t i = 0; i < commands->count; i++)
        stamped[i].cookie = cookie;
    status = rt_queue_submit(commands->queue, stamped, commands->count, waits, num_waits, point);
    if (status)
        return status;
    last = atomic_load(&commands->last_point);
    while (last < *point && !atomic_compare_exchange_weak(&commands->last_point, &last, *point))
        ;
    return TPURT_OK;
}
