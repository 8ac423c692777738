/* SPDX-License-Identifier: MIT */
/*
 * Resets that clear HBM, for functions that may get another owner: on the command
 * thread, once nothing of before runs and before the reset ends.
 */
#include <string.h>

#include "machine.h"

#define CLEAR_STEP (64u << 10)

void vtpu_core_reset_and_clear(VtpuCore *core)
{
    pthread_mutex_lock(&core->lock);
    core->clear = true;
    vtpu_core_start_reset(core);
    pthread_mutex_unlock(&core->lock);
}

bool vtpu_core_hbm_clear(VtpuCore *core)
{
    pthread_mutex_lock(&core->lock);
    bool clear = !core->clear;
    pthread_mutex_unlock(&core->lock);
    return clear;
}

/* Whether who waits for the machine does not want to wait for all of HBM. */
static bool is_wanted_elsewhere(VtpuCore *core)
{
    pthread_mutex_lock(&core->lock);
    bool wanted = core->exiting || core->park;
    pthread_mutex_unlock(&core->lock);
    return wanted;
}

/*
 * HBM to zero; false: not all of it. What is zero is only read, so that memory
 * which nobody touched costs the host nothing.
 */
static bool clear_hbm(VtpuCore *core)
{
    VtpuExec *x = &core->exec[0]; /* none is in progress */
    uint64_t at = 0;

    for (; at < core->hbm_bytes && !is_wanted_elsewhere(core); at += CLEAR_STEP) {
        uint8_t *part = core->hbm + at;

        if (part[0] || memcmp(part, part + 1, CLEAR_STEP - 1)) {
            memset(part, 0, CLEAR_STEP);
            vtpu_dirty(x, part, CLEAR_STEP);
        }
    }
    vtpu_dirty_flush(x);
    return at == core->hbm_bytes;
}

bool vtpu_clear_if_asked(VtpuCore *core)
{
    while (core->clear) {
        core->clear = false;
        pthread_mutex_unlock(&core->lock);
        bool whole = clear_hbm(core);
        if (whole && core->ops.hbm_cleared) {
            core->ops.hbm_cleared(core->opaque);
        }
        pthread_mutex_lock(&core->lock);
        if (!whole) {
            core->clear = true;
            return false;
        }
    }
    return true;
}
