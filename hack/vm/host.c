// What User Mode Linux 6.1 needs of its host to run well:
//
//   cc -shared -fPIC -o uml-host.so host.c -ldl && LD_PRELOAD=$PWD/uml-host.so linux.uml ...
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>
#include <time.h>

// It sleeps until a signal when it is idle. One that comes just before (a disk has answered) is noted and
// does not wake it: then it sleeps until its next timer, which may be never. So it sleeps 1 ms at most.
int sigsuspend(const sigset_t *mask)
{
	struct timespec most = {.tv_nsec = 1000000};

	return ppoll(NULL, 0, &most, mask);
}

// It sets its timer for one signal, and sets it again when that has come. One that comes while it still handles the one before is dropped (unblock_signals): a kernel that has work to do would
// then never again hear that time goes by, and do that work alone for good. So a signal comes again each 20 ms until the timer is set anew. One more does no harm.
int timer_settime(timer_t timer, int flags, const struct itimerspec *to, struct itimerspec *before)
{
	static int (*next)(timer_t, int, const struct itimerspec *, struct itimerspec *);
	struct itimerspec again = *to;

	if (!next)
		next = (int (*)(timer_t, int, const struct itimerspec *, struct itimerspec *))dlsym(RTLD_NEXT, "timer_settime");
	if (to->it_value.tv_sec != 0 || to->it_value.tv_nsec != 0)
		again.it_interval = (struct timespec){.tv_nsec = 20000000};
	return next(timer, flags, &again, before);
}

// Before it sleeps it looks at its timer, and does not sleep if that is not set: nothing
// would set it again then, and the idle kernel would spin for good. A signal more does no harm. It is blocked here and comes when the caller unblocks it.
int timer_gettime(timer_t timer, struct itimerspec *left)
{
	static int (*next)(timer_t, struct itimerspec *);

	if (!next)
		next = (int (*)(timer_t, struct itimerspec *))dlsym(RTLD_NEXT, "timer_gettime");
	int result = next(timer, left);
	if (result == 0 && left->it_value.tv_sec == 0 && left->it_value.tv_nsec == 0)
		raise(SIGALRM);
	return result;
}

// It sets the floating point registers of its processes with a buffer of 2696 bytes: AVX-512 and
// protection keys. A host with more (AMX) refuses all but a whole buffer with EFAULT, and the kernel dies
// at its first process. What it does not know of stays as it is.
long ptrace(enum __ptrace_request request, ...)
{
	static long (*next)(enum __ptrace_request, ...);
	static _Alignas(64) char whole[1 << 16];
	struct iovec *given, all = {whole, sizeof whole};
	va_list args;

	va_start(args, request);
	int pid = va_arg(args, int);
	void *address = va_arg(args, void *), *data = va_arg(args, void *);
	va_end(args);
	if (!next)
		next = (long (*)(enum __ptrace_request, ...))dlsym(RTLD_NEXT, "ptrace");
	given = data;
	if (request != PTRACE_SETREGSET || (long)address != NT_X86_XSTATE ||
	    next(PTRACE_GETREGSET, pid, address, &all) != 0 || given->iov_len >= all.iov_len)
		return next(request, pid, address, data);
	memcpy(whole, given->iov_base, given->iov_len);
	return next(PTRACE_SETREGSET, pid, address, &all);
}
