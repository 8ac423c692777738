/* SPDX-License-Identifier: MIT */
#include "init.h"

#include <signal.h>
#include <unistd.h>

/*
 * One program in two places: /init of the initramfs, which becomes PID 1 of
 * the guest, and /sbin/shutdown of the root filesystem, which the agent calls
 * and which only passes the wish on to PID 1.
 */
int main(void)
{
	sigset_t signals;

	if (getpid() != 1)
		return kill(1, SIGTERM) ? 1 : 0;

	/* A request to end, or a child that ends, is kept until supervise(). */
	sigemptyset(&signals);
	sigaddset(&signals, SIGCHLD);
	sigaddset(&signals, SIGTERM);
	sigprocmask(SIG_BLOCK, &signals, NULL);

	mount_kernel_filesystems();
	say("start");
	if (!load_modules("/modules"))
		power_off();
	say("modules loaded");
	resume_from_disk();
	enter_root();
	sethostname("vtpu", 4);
	load_environment();
	bring_up_network();
	/* A guest whose driver does not load is the place to find out why. */
	if (load_modules("/opt/vtpu/modules"))
		say("ready");
	start_command();
	/* Last: who can talk to the agent finds everything else done. */
	start_agent();
	supervise();
}
