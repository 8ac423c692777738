/* SPDX-License-Identifier: MIT */
/* Stands for the in-process back end in a library built without it. */
#include "backend.h"
#include "error.h"

int rt_core_open(const tpurt_device_desc *desc, tpurt_device_info *info, struct rt_backend **be)
{
    (void)desc;
    (void)info;
    (void)be;
    return rt_fail(TPURT_ERROR_NO_DEVICE,
                   "no vTPU found, and this library is built without the in-process machine");
}
