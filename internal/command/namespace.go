package command

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"
)

// UserNamespace returns a new user namespace with one user and one group, both of ID 1, and so without the machine's root. It lasts while the file, or anything
// that refers to it, is open. Failures are an *Error: the kernel may have no user namespaces, or not allow any (sysctl user.max_user_namespaces).
func UserNamespace() (*os.File, error) {
	argv := []string{"cat"} // waits for the end of its input
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
