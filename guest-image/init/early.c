/* SPDX-License-Identifier: MIT */
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#define NEW_ROOT "/new"
#define DISK_TRIES 1000 /* of 10 ms */

static void mount_or_die(const char *source, const char *target,
			 const char *type, unsigned long flags, const char *data)
{
	if (mount(source, target, type, flags, data))
		die("cannot mount %s on %s: %s", type, target, strerror(errno));
}

void mount_kernel_filesystems(void)
{
	int fd;

	mkdir("/dev", 0755);
	mkdir("/proc", 0555);
	mkdir("/sys", 0555);
	/* The kernel may have done so already; only the result matters. */
	mount("devtmpfs", "/dev", "devtmpfs", MS_NOSUID, "mode=0755");
	mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
	mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);

	fd = open("/dev/console", O_RDWR);
	if (fd >= 0) {
		dup2(fd, 0);
		dup2(fd, 1);
		dup2(fd, 2);
		if (fd > 2)
			close(fd);
	}
}

/* Disks are told apart by serial, so their order on the bus is free. */
static bool find_disk(const char *serial, char *device, size_t size)
{
	glob_t found;
	bool ok = false;

	if (glob("/sys/block/vd*/serial", 0, NULL, &found))
		return false;
	for (size_t i = 0; i < found.gl_pathc && !ok; i++) {
		char *text = read_file(found.gl_pathv[i]);

		if (text) {
			text[strcspn(text, "\n")] = '\0';
			ok = !strcmp(text, serial);
			free(text);
		}
		if (ok) {
			char *name = found.gl_pathv[i] + strlen("/sys/block/");

			snprintf(device, size, "/dev/%.*s",
				 (int)strcspn(name, "/"), name);
		}
	}
	globfree(&found);
	return ok;
}

static void wait_disk(const char *serial, char *device, size_t size)
{
	const struct timespec pause = { .tv_nsec = 10 * 1000 * 1000 };
	int tries = DISK_TRIES;

	while (!find_disk(serial, device, size)) {
		if (--tries == 0)
			die("no disk with serial '%s'", serial);
		nanosleep(&pause, NULL);
	}
}

static void mount_disk(const char *serial, const char *target, bool required)
{
	char device[64];

	if (required)
		wait_disk(serial, device, sizeof(device));
	else if (!find_disk(serial, device, sizeof(device)))
		return;
	mount_or_die(device, target, "erofs", MS_RDONLY, NULL);
}

/*
 * vtpu.resume=SERIAL: the disk may hold the image of a guest that hibernated. If it
 * does, that guest goes on, and of this one nothing is left. Nothing may be mounted.
 */
void resume_from_disk(void)
{
	char *serial = kernel_argument("vtpu.resume");
	char device[64];
	struct stat disk;
	int fd;

	if (!serial)
		return;
	wait_disk(serial, device, sizeof(device));
	fd = open("/sys/power/resume", O_WRONLY | O_CLOEXEC);
	if (fd < 0 || stat(device, &disk))
		die("cannot resume from %s: %s", device, strerror(errno));
	dprintf(fd, "%u:%u", major(disk.st_rdev), minor(disk.st_rdev));
	close(fd);
	free(serial);
}

/*
 * The root image is read-only and all writes go to memory: a guest that is
 * killed leaves its images as they were, and several guests can share them.
 */
void enter_root(void)
{
	mkdir("/lower", 0755);
	mkdir("/rw", 0755);
	mkdir(NEW_ROOT, 0755);
	mount_disk("root", "/lower", true);
	mount_or_die("tmpfs", "/rw", "tmpfs", 0, "mode=0755");
	mkdir("/rw/upper", 0755);
	mkdir("/rw/work", 0755);
	mount_or_die("overlay", NEW_ROOT, "overlay", 0,
		     "lowerdir=/lower,upperdir=/rw/upper,workdir=/rw/work");
	mount_disk("payload", NEW_ROOT "/opt/vtpu", false);
	mount_disk("model", NEW_ROOT "/opt/model", false);

	mount_or_die("/dev", NEW_ROOT "/dev", "", MS_MOVE, NULL);
	mount_or_die("/proc", NEW_ROOT "/proc", "", MS_MOVE, NULL);
	mount_or_die("/sys", NEW_ROOT "/sys", "", MS_MOVE, NULL);
	if (chdir(NEW_ROOT) || mount(".", "/", NULL, MS_MOVE, NULL) ||
	    chroot(".") || chdir("/"))
		die("cannot enter the root filesystem: %s", strerror(errno));

	mount_or_die("tmpfs", "/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755");
	mkdir("/dev/pts", 0755);
	mkdir("/dev/shm", 01777);
	mount_or_die("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC,
		     "mode=0620,ptmxmode=0666");
	mount_or_die("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, NULL);
	/* For debugging and the driver's tests; the guest lives without. */
	mount("debugfs", "/sys/kernel/debug", "debugfs", 0, NULL);
	mount("tracefs", "/sys/kernel/tracing", "tracefs", 0, NULL);
}
