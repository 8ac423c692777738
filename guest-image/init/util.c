/* SPDX-License-Identifier: MIT */
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static void speak(const char *kind, const char *format, va_list args)
{
	struct timespec now;
	char text[512];

	clock_gettime(CLOCK_BOOTTIME, &now);
	vsnprintf(text, sizeof(text), format, args);
	dprintf(STDERR_FILENO, "vtpu-init: %s%lld.%02ld %s\n", kind,
		(long long)now.tv_sec, now.tv_nsec / 10000000, text);
}

void say(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	speak("", format, args);
	va_end(args);
}

void die(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	speak("error: ", format, args);
	va_end(args);
	power_off();
}

char *read_file(const char *path)
{
	size_t size = 0, room = 4096;
	char *text = malloc(room);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t got;

	if (fd < 0 || !text) {
		free(text);
		if (fd >= 0)
			close(fd);
		return NULL;
	}
	while ((got = read(fd, text + size, room - size - 1)) > 0) {
		size += got;
		if (room - size == 1) {
			char *more = realloc(text, room * 2);

			if (!more)
				break;
			text = more;
			room *= 2;
		}
	}
	close(fd);
	text[size] = '\0';
	return text;
}

char *kernel_argument(const char *name)
{
	char *line = read_file("/proc/cmdline");
	size_t length = strlen(name);
	char *found = NULL, *rest = line, *word;

	while (line && (word = strsep(&rest, " \n")))
		if (!strncmp(word, name, length) && word[length] == '=')
			found = word + length + 1;
	found = found ? strdup(found) : NULL;
	free(line);
	return found;
}

/* ENODEV: a module for a CPU feature that this one lacks, with a generic twin. */
static bool load_module(const char *path)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	bool ok;

	ok = fd >= 0 && (!syscall(SYS_finit_module, fd, "", 0) || errno == EEXIST ||
			 errno == ENODEV);
	if (!ok)
		say("error: cannot load module %s: %s%s", path, strerror(errno),
		    errno == ENOEXEC ? " (built for another kernel?)" : "");
	if (fd >= 0)
		close(fd);
	return ok;
}

/*
 * The order is worked out when the image is built, so that no modprobe, no
 * index and no decompression is needed here.
 */
bool load_modules(const char *dir)
{
	bool ok = true;

	char path[256], *order, *rest, *name;

	snprintf(path, sizeof(path), "%s/order", dir);
	order = rest = read_file(path);
	while (ok && rest && (name = strsep(&rest, "\n"))) {
		if (!*name)
			continue;
		snprintf(path, sizeof(path), "%s/%s", dir, name);
		ok = load_module(path);
	}
	free(order);
	return ok;
}
