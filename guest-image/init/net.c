/* SPDX-License-Identifier: MIT */
#include "init.h"

#include <arpa/inet.h>
#include <errno.h>
#include <linux/if.h>
#include <linux/route.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

static struct sockaddr ipv4(const char *text)
{
	struct sockaddr_in address = { .sin_family = AF_INET };
	struct sockaddr generic;

	inet_pton(AF_INET, text, &address.sin_addr);
	memcpy(&generic, &address, sizeof(generic));
	return generic;
}

static struct ifreq request(const char *name)
{
	struct ifreq request = { 0 };

	strncpy(request.ifr_name, name, sizeof(request.ifr_name) - 1);
	return request;
}

static int interface_up(int fd, const char *name)
{
	struct ifreq flags = request(name);

	if (ioctl(fd, SIOCGIFFLAGS, &flags))
		return -1;
	flags.ifr_flags |= IFF_UP;
	return ioctl(fd, SIOCSIFFLAGS, &flags);
}

/* A guest without a network card is fine: tests run through the agent. */
void bring_up_network(void)
{
	struct ifreq address = request("eth0"), mask = request("eth0");
	struct rtentry route = { .rt_flags = RTF_UP | RTF_GATEWAY };
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	if (fd < 0)
		die("cannot open a socket: %s", strerror(errno));
	if (interface_up(fd, "lo"))
		say("cannot bring up lo: %s", strerror(errno));

	address.ifr_addr = ipv4("10.0.2.15");
	mask.ifr_netmask = ipv4("255.255.255.0");
	route.rt_dst = ipv4("0.0.0.0");
	route.rt_genmask = ipv4("0.0.0.0");
	route.rt_gateway = ipv4("10.0.2.2");
	if (ioctl(fd, SIOCSIFADDR, &address)) {
		if (errno != ENODEV)
			say("cannot set the address of eth0: %s", strerror(errno));
	} else if (ioctl(fd, SIOCSIFNETMASK, &mask) || interface_up(fd, "eth0") ||
		   ioctl(fd, SIOCADDRT, &route)) {
		say("cannot bring up eth0: %s", strerror(errno));
	}
	close(fd);
}
