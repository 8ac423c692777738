/* SPDX-License-Identifier: MIT */
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/reboot.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_WORDS 64
#define GRACE_SECONDS 2

static pid_t agent, command;

/* Without udev nothing names the virtio ports; sysfs knows their names. */
static bool find_port(const char *name, char *device, size_t size)
{
	glob_t found;
	bool ok = false;

	if (glob("/sys/class/virtio-ports/*/name", 0, NULL, &found))
		return false;
	for (size_t i = 0; i < found.gl_pathc && !ok; i++) {
		char *path = found.gl_pathv[i], *text = read_file(path);

		if (!text)
			continue;
		text[strcspn(text, "\n")] = '\0';
		ok = !strcmp(text, name);
		free(text);
		if (ok) {
			path += strlen("/sys/class/virtio-ports/");
			snprintf(device, size, "/dev/%.*s",
				 (int)strcspn(path, "/"), path);
		}
	}
	globfree(&found);
	return ok;
}

/* Lines of NAME=VALUE that the payload asks for, over a few fixed ones. */
void load_environment(void)
{
	char *text = read_file("/opt/vtpu/environment"), *rest = text, *line;

	setenv("PATH", "/opt/vtpu/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin", 1);
	setenv("HOME", "/root", 1);
	setenv("LANG", "C.UTF-8", 1);
	setenv("TERM", "linux", 0);
	while (rest && (line = strsep(&rest, "\n"))) {
		char *value = strchr(line, '=');

		if (!value || *line == '#')
			continue;
		*value++ = '\0';
		setenv(line, value, 1);
	}
	free(text);
}

static pid_t spawn(char **words, const char *output, bool terminal)
{
	pid_t pid = fork();
	sigset_t none;

	if (pid < 0)
		die("cannot fork: %s", strerror(errno));
	if (pid > 0)
		return pid;

	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	setsid();
	if (terminal) {
		int fd = open("/dev/ttyS0", O_RDWR);

		dup2(fd, 0);
		dup2(fd, 1);
		dup2(fd, 2);
		ioctl(0, TIOCSCTTY, 1);
	} else {
		dup2(open("/dev/null", O_RDONLY), 0);
		if (output) {
			int fd = open(output, O_WRONLY);

			if (fd >= 0) {
				dup2(fd, 1);
				dup2(fd, 2);
			}
		}
	}
	if (chdir("/root"))
		say("cannot enter /root: %s", strerror(errno));
	execvp(words[0], words);
	say("error: cannot run %s: %s", words[0], strerror(errno));
	_exit(127);
}

void start_agent(void)
{
	char port[64];
	char *words[] = { "qemu-ga", "--method=virtio-serial", "-p", port, NULL };

	if (find_port("org.qemu.guest_agent.0", port, sizeof(port)))
		agent = spawn(words, "/dev/null", false);
}

static void decode_percent(char *text)
{
	char *out = text;
	unsigned int byte;

	for (; *text; text++) {
		if (*text == '%' && sscanf(text + 1, "%2x", &byte) == 1) {
			*out++ = (char)byte;
			text += 2;
		} else {
			*out++ = *text;
		}
	}
	*out = '\0';
}

/* vtpu.start=WORD,WORD,... with %XX escapes; vtpu.terminal=1 puts it on ttyS0. */
void start_command(void)
{
	char *text = kernel_argument("vtpu.start"), *rest = text;
	char *terminal = kernel_argument("vtpu.terminal");
	char *words[MAX_WORDS + 1] = { NULL }, port[64];
	int count = 0;

	while (rest && count < MAX_WORDS) {
		words[count] = strsep(&rest, ",");
		decode_percent(words[count++]);
	}
	if (count > 0 && *words[0])
		command = spawn(words, find_port("vtpu.log", port, sizeof(port)) ?
				port : NULL, terminal != NULL);
	free(terminal);
	free(text);
}

void power_off(void)
{
	sync();
	reboot(RB_POWER_OFF);
	for (;;)
		pause();
}

/* Everybody gets a chance to end in order, but a stuck process only delays. */
static void end_processes(void)
{
	const struct timespec pause = { .tv_nsec = 20 * 1000 * 1000 };
	int rounds = GRACE_SECONDS * 50;

	kill(-1, SIGTERM);
	while (rounds-- > 0) {
		pid_t pid = waitpid(-1, NULL, WNOHANG);

		if (pid < 0 && errno == ECHILD)
			return;
		if (pid == 0)
			nanosleep(&pause, NULL);
	}
	kill(-1, SIGKILL);
}

/* As PID 1: adopt orphans, keep the agent, end when told or when it is done. */
void supervise(void)
{
	sigset_t signals;
	siginfo_t info;

	sigemptyset(&signals);
	sigaddset(&signals, SIGCHLD);
	sigaddset(&signals, SIGTERM);
	sigprocmask(SIG_BLOCK, &signals, NULL);
	for (;;) {
		int status;
		pid_t pid;

		while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
			if (pid == agent)
				start_agent();
			if (pid != command)
				continue;
			if (WIFEXITED(status))
				say("command exited with status %d", WEXITSTATUS(status));
			else
				say("command killed by signal %d", WTERMSIG(status));
			goto end;
		}
		if (sigwaitinfo(&signals, &info) == SIGTERM)
			goto end;
	}
end:
	say("power off");
	end_processes();
	power_off();
}
