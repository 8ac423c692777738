/* SPDX-License-Identifier: GPL-2.0 */
#ifndef _VTPU_HANG_H_
#define _VTPU_HANG_H_

#include <linux/types.h>

struct vtpu_hwq;

void vtpu_hang_set_limits(struct vtpu_hwq *hwq, u32 timeout_ms, u32 stall_ms);
bool vtpu_hang_is_due(const struct vtpu_hwq *hwq);
bool vtpu_hwq_is_hung(struct vtpu_hwq *hwq);
bool vtpu_hang_watch_user(struct vtpu_hwq *hwq);

#endif
