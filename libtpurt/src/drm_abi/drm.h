/* SPDX-License-Identifier: MIT */
/*
 * The part of the kernel's DRM interface that the driver back end needs, so
 * that neither the guest nor the host must have libdrm's headers installed.
 * The names and layouts are the kernel's ABI.
 */
#ifndef RT_DRM_ABI_H
#define RT_DRM_ABI_H

#include <linux/types.h>
#include <stddef.h>
#include <sys/ioctl.h>

#define DRM_COMMAND_BASE 0x40
#define DRM_IOW(number, type) _IOW('d', number, type)
#define DRM_IOWR(number, type) _IOWR('d', number, type)

struct drm_version {
    int version_major, version_minor, version_patchlevel;
    size_t name_len;
    char *name;
    size_t date_len;
    char *date;
    size_t desc_len;
    char *desc;
};

struct drm_gem_close {
    __u32 handle, pad;
};

struct drm_syncobj_create {
    __u32 handle, flags;
};

struct drm_syncobj_destroy {
    __u32 handle, pad;
};

struct drm_syncobj_timeline_wait {
    __u64 handles, points; /* user pointers */
    __s64 timeout_nsec;    /* absolute, CLOCK_MONOTONIC */
    __u32 count_handles, flags, first_signaled, pad;
};

struct drm_syncobj_eventfd {
    __u32 handle, flags;
    __u64 point;
    __s32 fd;
    __u32 pad;
};

#define DRM_IOCTL_VERSION DRM_IOWR(0x00, struct drm_version)
#define DRM_IOCTL_GEM_CLOSE DRM_IOW(0x09, struct drm_gem_close)
#define DRM_IOCTL_SYNCOBJ_CREATE DRM_IOWR(0xbf, struct drm_syncobj_create)
#define DRM_IOCTL_SYNCOBJ_DESTROY DRM_IOWR(0xc0, struct drm_syncobj_destroy)
#define DRM_IOCTL_SYNCOBJ_TIMELINE_WAIT DRM_IOWR(0xca, struct drm_syncobj_timeline_wait)
#define DRM_IOCTL_SYNCOBJ_EVENTFD DRM_IOWR(0xcf, struct drm_syncobj_eventfd)

#endif
