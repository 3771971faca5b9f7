// A disk whose cache goes with the power, for a QEMU that has it as a file (format=raw, aio=threads):
//
//   cc -shared -fPIC -o disk.so disk.c -ldl && LD_PRELOAD=$PWD/disk.so VM_DISK=FILE VM_DISK_KEEPS=50 qemu-system-x86_64 ...
//
// What it writes to the file stays in the memory of its process until it flushes the disk: SIGKILL loses it. Of each 100 writes VM_DISK_KEEPS (default 0)
// reach the file at once, at random; so later writes survive earlier ones. What is torn is torn between blocks of 4 KiB.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define BLOCK 4096

static struct stat disk;
static int file = -1, keeps;
static char *now;	// the disk as the kernel sees it: a private mapping of the file
static char *unflushed; // for each block, whether it is in the mapping alone
static off_t *blocks;	// those that are, in the order in which they were written first
static size_t many;
static unsigned int seed;
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER; // of the threads that do its I/O

__attribute__((constructor)) static void begin(void)
{
	const char *path = getenv("VM_DISK"), *share = getenv("VM_DISK_KEEPS");

	if (!path)
		return;
	if ((file = open(path, O_RDWR | O_CLOEXEC)) < 0 || fstat(file, &disk) != 0)
		abort();
	size_t all = disk.st_size / BLOCK;
	now = mmap(NULL, disk.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file, 0);
	unflushed = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	blocks = mmap(NULL, all * sizeof *blocks, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (now == MAP_FAILED || unflushed == MAP_FAILED || blocks == MAP_FAILED)
		abort();
	keeps = share ? atoi(share) : 0;
	seed = getpid();
}

static int is_disk(int fd)
{
	struct stat st;

	return file >= 0 && fstat(fd, &st) == 0 && st.st_dev == disk.st_dev && st.st_ino == disk.st_ino;
}

// The whole of a range of the disk: there is nothing beyond its end.
static ssize_t within(off_t at, size_t length)
{
	if (at >= disk.st_size)
		return 0;
	return length < (size_t)(disk.st_size - at) ? length : (size_t)(disk.st_size - at);
}

static int flush(void)
{
	for (size_t i = 0; i < many; i++) {
		off_t at = blocks[i] * BLOCK;

		if (syscall(SYS_pwrite64, file, now + at, BLOCK, at) != BLOCK)
			return -1;
		unflushed[blocks[i]] = 0;
	}
	if (many > 0)
		madvise(now, disk.st_size, MADV_DONTNEED); // the file has it all
	many = 0;
	return 0;
}

static ssize_t get(void *to, size_t length, off_t at)
{
	ssize_t n = within(at, length);

	pthread_mutex_lock(&turn);
	memcpy(to, now + at, n);
	pthread_mutex_unlock(&turn);
	return n;
}

static ssize_t put(const void *from, size_t length, off_t at)
{
	ssize_t n = within(at, length);

	pthread_mutex_lock(&turn);
	memcpy(now + at, from, n);
	if (keeps > 0 && rand_r(&seed) % 100 < keeps) {
		n = syscall(SYS_pwrite64, file, from, n, at);
	} else {
		for (off_t s = at / BLOCK; s * BLOCK < at + n; s++)
			if (!unflushed[s]) {
				unflushed[s] = 1;
				blocks[many++] = s;
			}
	}
	pthread_mutex_unlock(&turn);
	return n;
}

ssize_t pread64(int fd, void *to, size_t length, off64_t at)
{
	return is_disk(fd) ? get(to, length, at) : syscall(SYS_pread64, fd, to, length, at);
}

ssize_t __pread64_chk(int fd, void *to, size_t length, off64_t at, size_t room) { return length > room ? (abort(), -1) : pread64(fd, to, length, at); }

ssize_t pwrite64(int fd, const void *from, size_t length, off64_t at)
{
	return is_disk(fd) ? put(from, length, at) : syscall(SYS_pwrite64, fd, from, length, at);
}

ssize_t preadv64(int fd, const struct iovec *to, int count, off64_t at)
{
	ssize_t n, all = 0;

	if (!is_disk(fd))
		return syscall(SYS_preadv, fd, to, count, at, 0);
	for (int i = 0; i < count; i++, all += n)
		if ((n = get(to[i].iov_base, to[i].iov_len, at + all)) < (ssize_t)to[i].iov_len)
			return all + n;
	return all;
}

ssize_t pwritev64(int fd, const struct iovec *from, int count, off64_t at)
{
	ssize_t n, all = 0;

	if (!is_disk(fd))
		return syscall(SYS_pwritev, fd, from, count, at, 0);
	for (int i = 0; i < count; i++, all += n)
		if ((n = put(from[i].iov_base, from[i].iov_len, at + all)) < 0)
			return -1;
	return all;
}

static int flush_disk(void)
{
	pthread_mutex_lock(&turn);
	int result = flush();
	pthread_mutex_unlock(&turn);
	return result;
}

int fsync(int fd) { return is_disk(fd) ? flush_disk() : syscall(SYS_fsync, fd); }

int fdatasync(int fd) { return is_disk(fd) ? flush_disk() : syscall(SYS_fdatasync, fd); }

// Blocks that are discarded or zeroed are so for good, and all that was written before them is there.
int fallocate64(int fd, int mode, off64_t at, off64_t length)
{
	if (!is_disk(fd))
		return syscall(SYS_fallocate, fd, mode, at, length);
	pthread_mutex_lock(&turn);
	int result = flush() != 0 ? -1 : syscall(SYS_fallocate, fd, mode, at, length);
	if (result == 0)
		madvise(now, disk.st_size, MADV_DONTNEED);
	pthread_mutex_unlock(&turn);
	return result;
}
