package anynode

import (
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"math"
	"net"
	"net/rpc"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// away is the machine beside home.
var away = consumers[0]

// machines is a cluster whose nodes are machines with a kernel and a disk of their own each (hack/vm/machine.sh). Controller and API
// server are on none of them.
type machines struct {
	*nodes
	all map[string]*machine
}

func newMachines(t testing.TB, flags map[string][]string, names ...string) *machines {
	t.Helper()
	if os.Getenv("ASHLAR_MACHINES") != "1" {
		t.Skip("machines boot in a network of their own: hack/vm/machines.sh runs this")
	}
	drivertest.NeedRoot(t)
	in, program, api := newCluster(t)
	in.more, in.network = flags, &network{TB: t, api: api, relays: map[string]*relay{}}
	c := &machines{nodes: in, all: map[string]*machine{}}
	for _, line := range []string{"ip link add cables type bridge", "ip addr add 10.78.0.254/24 dev cables", "ip link set cables up"} {
		drivertest.Run(t, strings.Fields(line)...)
	}
	t.Cleanup(func() { drivertest.Run(t, "ip", "link", "del", "cables") })
	for i, name := range names {
		m := &machine{TB: t, name: name, tap: "to-" + name, address: fmt.Sprintf("10.78.0.%d", i+1), dir: filepath.Join(c.dir, name)}
		check.OK(t, os.Mkdir(m.dir, 0o700))
		drivertest.Run(t, "ip", "tuntap", "add", m.tap, "mode", "tap")
		t.Cleanup(func() { drivertest.Run(t, "ip", "link", "del", m.tap) })
		drivertest.Run(t, "ip", "link", "set", m.tap, "master", "cables", "up")
		listener, err := net.Listen("tcp", "10.78.0.254:0")
		check.OK(t, err)
		c.carry(name, listener)
		m.argv = append([]string{program}, c.flags(name, m.address, listener.Addr().String(), poolInMachine)...)
		c.all[name] = m
		m.boot()
		t.Cleanup(m.cut)
	}
	c.ready(names...)
	c.control(program, names...)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(c.said())
		}
	})
	return c
}

// said is the end of what machines and their drivers have said.
func (c *machines) said() (all string) {
	for name, m := range c.all {
		for _, file := range []string{"console", "driver.log"} {
			text, _ := os.ReadFile(filepath.Join(m.dir, file))
			all += fmt.Sprintf("--- %s of %s\n%s\n", file, name, text[max(0, len(text)-16000):])
		}
	}
	return all + c.logs()
}

// ready waits until the drivers of machines are.
func (c *machines) ready(names ...string) {
	c.Helper()
	for _, name := range names {
		c.eventually("machine "+name+" is up", func() bool {
			ctx, cancel := context.WithTimeout(c.Context(), callTime)
			defer cancel()
			return c.all[name].ask(ctx, "Ready", true, new(bool)) == nil
		})
	}
}

// machine is one that can lose its power, and have it again.
type machine struct {
	testing.TB
	name, tap, address, dir string
	argv                    []string // its driver
	keeps                   int      // how many percent of what its disk has not flushed survive the next power cut

	kernel *exec.Cmd // nil without power
	ended  chan struct{}

	mu   sync.Mutex
	open []net.Conn // of writers
}

// boot gives the machine its power. It does not wait for anything.
func (m *machine) boot() {
	m.Helper()
	self, err := os.Executable()
	check.OK(m, err)
	_, file, _, _ := runtime.Caller(0)
	m.kernel = exec.Command(filepath.Join(filepath.Dir(file), "../../hack/vm/machine.sh"),
		append([]string{m.dir, m.tap, m.address + "/24", "env", machineName + "=" + m.name, self}, m.argv...)...)
	m.kernel.Env = append(os.Environ(), fmt.Sprintf("VM_DISK_KEEPS=%d", m.keeps))
	m.kernel.Stderr = os.Stderr
	m.keeps = 50 - m.keeps
	m.kernel.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	check.OK(m, m.kernel.Start())
	m.ended = make(chan struct{})
	go func() {
		defer close(m.ended)
		_ = m.kernel.Wait() // it is killed
	}()
}

// cut takes the power away. What the kernel had in its memory is lost, and what its disk has not flushed.
func (m *machine) cut() {
	m.Helper()
	if m.kernel == nil {
		return
	}
	pid := m.kernel.Process.Pid
	m.kernel = nil
	_ = syscall.Kill(-pid, syscall.SIGKILL) // it may have ended
	<-m.ended
	for end := time.Now().Add(patient); syscall.Kill(-pid, 0) == nil; time.Sleep(time.Millisecond) { // the kernel is several processes
		if time.Now().After(end) {
			m.Fatalf("machine %s does not end", m.name)
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, conn := range m.open { // nobody at the other end closes them
		conn.Close()
	}
	m.open = nil
}

// freeze has the machine stand still, until it is thawed.
func (m *machine) freeze() (thaw func()) {
	m.Helper()
	kernel := m.kernel
	check.OK(m, kernel.Process.Signal(syscall.SIGSTOP))
	thaw = sync.OnceFunc(func() {
		if m.kernel == kernel { // it has its power still
			check.OK(m, kernel.Process.Signal(syscall.SIGCONT))
		}
	})
	m.Cleanup(thaw)
	return thaw
}

// ask calls a method of the machine's Guest.
func (m *machine) ask(ctx context.Context, method string, of, answer any) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", net.JoinHostPort(m.address, asksPort))
	if err != nil {
		return err
	}
	end, _ := ctx.Deadline()
	if err := conn.SetDeadline(end); err != nil {
		return errors.Join(err, conn.Close())
	}
	client := rpc.NewClient(conn)
	return errors.Join(client.Call("Guest."+method, of, answer), client.Close())
}

// write starts a writer in the machine.
func (m *machine) write(what toWrite) *writer {
	m.Helper()
	conn, err := net.DialTimeout("tcp", net.JoinHostPort(m.address, writesPort), callTime)
	check.OK(m, err)
	m.mu.Lock()
	m.open = append(m.open, conn)
	m.mu.Unlock()
	check.OK(m, gob.NewEncoder(conn).Encode(what))
	w := &writer{tag: what.Tag, done: make(chan struct{})}
	w.began.Store(math.MaxUint64) // nobody knows before it has ended
	go func() {
		defer close(w.done)
		defer conn.Close()
		in := gob.NewDecoder(conn)
		for now := (written{}); !now.Ended; {
			now = written{}
			if w.err = in.Decode(&now); w.err != nil {
				return
			}
			w.acked.Store(now.Acked)
			if now.Ended {
				w.began.Store(now.Began)
			}
			if now.Err != "" {
				w.err = errors.New(now.Err)
			}
			if w.stop.Load() {
				_, _ = conn.Write([]byte{0}) // it may have ended
			}
		}
	}()
	return w
}
