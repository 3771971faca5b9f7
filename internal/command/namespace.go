package command

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"
)

// UserNamespace returns a new user namespace, in which there is one user and one group, of the
// number 1, and so no root of the machine. It lasts for as long as the file is open, and what
// refers to it. A failure is an *Error: the kernel may not have user namespaces, or be told to
// make none (sysctl user.max_user_namespaces).
func UserNamespace() (*os.File, error) {
	argv := []string{"cat"} // which waits for the end of its input
	cmd := exec.Command(find(argv[0]))
	cmd.Env = []string{"LC_ALL=C", "PATH=" + searchPath}
	one := []syscall.SysProcIDMap{{ContainerID: 1, HostID: 1, Size: 1}}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Cloneflags: syscall.CLONE_NEWUSER, UidMappings: one, GidMappings: one}
	input, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return nil, &Error{Argv: argv, Code: -1, Err: err}
	}
	namespace, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", cmd.Process.Pid))
	_ = input.Close()
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	_ = cmd.Wait() // it was killed
	if err != nil {
		return nil, &Error{Argv: argv, Code: -1, Err: err}
	}
	return namespace, nil
}
