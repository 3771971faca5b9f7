package drivertest

import (
	"os"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ashlar-csi/ashlar/internal/check"
)

// Terminal opens a terminal (pty(7)), until the test ends. program is the side of a program, person that of its user, whose reads fail after two minutes.
func Terminal(t testing.TB, rows, columns uint16) (program, person *os.File) {
	t.Helper()
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	check.OK(t, err)
	person = os.NewFile(uintptr(fd), "/dev/ptmx")
	t.Cleanup(func() { _ = person.Close() })
	check.OK(t, person.SetReadDeadline(time.Now().Add(2*time.Minute)))
	check.OK(t, unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0))
	number, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	check.OK(t, err)
	Resize(t, person, rows, columns)
	program, err = os.OpenFile("/dev/pts/"+strconv.Itoa(number), os.O_RDWR|unix.O_NOCTTY, 0)
	check.OK(t, err)
	t.Cleanup(func() { _ = program.Close() })
	return program, person
}

// Resize sets the size of a terminal.
func Resize(t testing.TB, person *os.File, rows, columns uint16) {
	t.Helper()
	conn, err := person.SyscallConn()
	check.OK(t, err)
	var resized error
	check.OK(t, conn.Control(func(fd uintptr) {
		resized = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: columns})
	}))
	check.OK(t, resized)
}
