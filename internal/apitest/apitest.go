// Package apitest gives tests a real Kubernetes API server, with the custom resources of
// deploy/kubernetes/crds and what its guard.yaml holds agents to: etcd and kube-apiserver on loopback, in a directory that goes with
// them. One serves all tests of a package, which calls Main from its TestMain. In a virtual machine it is one of the machine's host (Serve).
package apitest

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"maps"
	mathrand "math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"
)

// Admin is the user who may do everything.
const Admin = "admin"

// Main runs the tests of a package and ends the API server that they used.
func Main(m *testing.M) {
	code := m.Run()
	Stop()
	os.Exit(code)
}

// Stop ends the API server, if a test started it. It is for a TestMain of its own.
func Stop() {
	if running != nil {
		running.Stop()
	}
}

var (
	start    sync.Once
	running  *Server
	startErr error
)

// Get returns the API server, which the first test to ask starts.
func Get(t testing.TB) *Server {
	t.Helper()
	start.Do(func() { running, startErr = Launch() })
	if startErr != nil {
		t.Fatal(startErr)
	}
	if running.broken != nil {
		t.Fatalf("the API server did not start again, in a test before this one: %v", running.broken)
	}
	return running
}

// Server is a running API server. Authorisation is RBAC.
type Server struct {
	url    string
	on     place
	broken error // it was to start again, and did not

	agents struct {
		sync.Mutex
		tokens map[string]string // by node
	}
}

// place is where an API server and its etcd run.
type place interface {
	freeze() error // returns when nothing of the API server answers any more
	thaw() error
	kill() error
	start() error // after kill: returns when it answers
	stop()        // removes what was theirs, too
}

// Config connects with a token. That of Admin and of the users is the name; Agent has those of agents.
func (s *Server) Config(token string) *rest.Config { return configOf(s.url, token) }

func configOf(url, token string) *rest.Config {
	config := &rest.Config{Host: url, BearerToken: token, QPS: -1, TLSClientConfig: rest.TLSClientConfig{Insecure: true}}
	late(config, token)
	return config
}

// Kubeconfig writes a file that lets a program connect as a configuration says.
func (s *Server) Kubeconfig(as *rest.Config, path string) error {
	return s.KubeconfigIn(as, "", path)
}

// KubeconfigIn is Kubeconfig for a program that works in a namespace.
func (s *Server) KubeconfigIn(as *rest.Config, namespace, path string) error {
	config := api.NewConfig()
	config.Clusters["test"] = &api.Cluster{Server: as.Host, InsecureSkipTLSVerify: true}
	config.AuthInfos["test"] = &api.AuthInfo{Token: as.BearerToken}
	config.Contexts["test"] = &api.Context{Cluster: "test", AuthInfo: "test", Namespace: namespace}
	config.CurrentContext = "test"
	return clientcmd.WriteToFile(*config, path)
}

// Users besides Admin, who may do what roles are bound to them.
var users = []string{"controller", "user"}

func root() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Join(filepath.Dir(file), "../..")
}

// binaries is the directory of etcd and the API server: $ASHLAR_APISERVER, for machines that
// cannot build them (a virtual one, say), else what hack/apiserver.sh builds.
func binaries() (string, error) {
	if directory := os.Getenv("ASHLAR_APISERVER"); directory != "" {
		return directory, nil
	}
	build := exec.Command(filepath.Join(root(), "hack/apiserver.sh"))
	var said bytes.Buffer
	build.Stderr = &said
	out, err := build.Output()
	if err != nil {
		return "", fmt.Errorf("hack/apiserver.sh: %w: %s", err, said.String())
	}
	return strings.TrimSpace(string(out)), nil
}

// startTimeout is how long an API server may take to start, on a busy machine.
const startTimeout = 5 * time.Minute

// Launch starts an API server with more flags, for programs that are no tests.
func Launch(flags ...string) (*Server, error) {
	if address, far := strings.CutPrefix(os.Getenv("ASHLAR_APISERVER"), farScheme); far {
		return launchFar(address, flags)
	}
	bin, err := binaries()
	if err != nil {
		return nil, err
	}
	for tries := 1; ; tries++ { // others may take the ports before the server does
		s, err := launch(bin, flags)
		if err == nil || tries == 3 || !strings.Contains(err.Error(), "address already in use") {
			return s, err
		}
	}
}

func launch(bin string, flags []string) (_ *Server, err error) {
	on := &local{}
	if on.dir, err = os.MkdirTemp("", "ashlar-api"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			on.stop()
		}
	}()
	ports, err := freePorts(3)
	if err != nil {
		return nil, err
	}
	etcd := "http://127.0.0.1:" + ports[0]
	on.url = "https://127.0.0.1:" + ports[2]
	if err := on.files(); err != nil {
		return nil, err
	}
	// etcd gives a request 5 s and two election timeouts, which a machine that stalls must not exceed; a start
	// takes up to one election timeout.
	if err := on.run(filepath.Join(bin, "etcd"), "--data-dir="+on.dir+"/etcd", "--unsafe-no-fsync", "--log-level=warn", "--election-timeout=5000",
		"--listen-client-urls="+etcd, "--advertise-client-urls="+etcd, "--listen-peer-urls=http://127.0.0.1:"+ports[1]); err != nil {
		return nil, err
	}
	if err := on.run(append([]string{filepath.Join(bin, "kube-apiserver"), "--etcd-servers=" + etcd, "--bind-address=127.0.0.1",
		"--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none", "--secure-port=" + ports[2], "--cert-dir=" + on.dir, "--authorization-mode=RBAC", "--allow-privileged",
		"--token-auth-file=" + on.dir + "/tokens", "--service-cluster-ip-range=10.96.0.0/24",
		"--service-account-issuer=https://test", "--service-account-key-file=" + on.dir + "/key", "--service-account-signing-key-file=" + on.dir + "/key"}, flags...)...); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	if err := on.ready(ctx); err != nil {
		return nil, err
	}
	s := newServer(on.url, on)
	if err := s.Define(ctx); err != nil {
		return nil, err
	}
	return s, s.Guard(ctx, "block.csi.ashlar.dev")
}

func newServer(url string, on place) *Server {
	s := &Server{url: url, on: on}
	s.agents.tokens = map[string]string{}
	return s
}

// local is an API server whose processes are this one's.
type local struct {
	dir, url  string
	processes []*process // in the order of their starts
}

// self is a user that no other server knows.
func (s *local) self() string { return filepath.Base(s.dir) }

func (s *local) files() error {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return err
	}
	block := &pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}
	if err := os.WriteFile(s.dir+"/key", pem.EncodeToMemory(block), 0o600); err != nil {
		return err
	}
	tokens := ""
	for _, user := range []string{Admin, s.self()} {
		tokens += user + "," + user + "," + user + ",system:masters\n"
	}
	for _, user := range users {
		tokens += user + "," + user + "," + user + "\n"
	}
	return os.WriteFile(s.dir+"/tokens", []byte(tokens), 0o600)
}

// freePorts finds ports that nothing listens on now, and that the kernel gives to nobody who does not ask for them (ip_local_port_range, ip(7)): a server that was killed
// finds them free when it starts again.
func freePorts(n int) ([]string, error) {
	local, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		return nil, err
	}
	var given int // the first that the kernel gives
	if _, err := fmt.Sscan(string(local), &given); err != nil {
		return nil, err
	}
	if given <= firstPort {
		return nil, fmt.Errorf("/proc/sys/net/ipv4/ip_local_port_range is %q: it is to leave ports from %d on to those who ask for them", local, firstPort)
	}
	ports := map[string]bool{}
	for tries := 0; len(ports) < n; tries++ {
		port := strconv.Itoa(firstPort + mathrand.IntN(given-firstPort))
		listener, err := net.Listen("tcp", "127.0.0.1:"+port)
		switch {
		case err == nil:
			listener.Close()
			ports[port] = true
		case tries > 1000:
			return nil, err
		}
	}
	return slices.Collect(maps.Keys(ports)), nil
}

// firstPort is above those of well-known services.
const firstPort = 10000

// process is a child that ends with this process, however that ends.
type process struct {
	*exec.Cmd
	exited chan struct{}
}

func (s *local) run(argv ...string) error {
	log, err := os.Create(filepath.Join(s.dir, filepath.Base(argv[0])+".log"))
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = s.dir, log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	p := &process{cmd, make(chan struct{})}
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // the signal comes when the thread that started it ends
		defer close(p.exited)
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // it is killed
		}
	}()
	if err := <-started; err != nil {
		return err
	}
	s.processes = append(s.processes, p)
	return nil
}

func (s *local) ready(ctx context.Context) error {
	client, err := rest.HTTPClientFor(configOf(s.url, s.self())) // another server may have the port
	if err != nil {
		return err
	}
	for {
		var response *http.Response
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+"/readyz?verbose", nil)
		if err == nil {
			response, err = client.Do(request)
		}
		if err == nil {
			said, _ := io.ReadAll(response.Body) // for people
			response.Body.Close()
			if response.StatusCode == http.StatusOK {
				return nil
			}
			err = fmt.Errorf("%s: %s", response.Status, said)
		}
		for _, p := range s.processes {
			select {
			case <-p.exited:
				log, _ := os.ReadFile(filepath.Join(s.dir, filepath.Base(p.Path)+".log"))
				return fmt.Errorf("%s ended: %s", p.Path, log)
			default:
			}
		}
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("the API server is not ready"), err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// Freeze stops the API server from answering, as a network that is cut does, until thaw is
// called.
func (s *Server) Freeze(t testing.TB) (thaw func()) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(s.on.freeze())
	thaw = sync.OnceFunc(func() { must(s.on.thaw()) })
	t.Cleanup(thaw)
	return thaw
}

// Kill ends the API server and its etcd as kill -9 does, until start is called.
func (s *Server) Kill(t testing.TB) (start func()) {
	t.Helper()
	if err := s.on.kill(); err != nil {
		t.Fatal(err)
	}
	start = sync.OnceFunc(func() {
		t.Helper()
		if s.broken = s.on.start(); s.broken != nil {
			t.Fatal(s.broken)
		}
	})
	t.Cleanup(start)
	return start
}

// Stop ends the API server, and removes what was its.
func (s *Server) Stop() { s.on.stop() }

func (s *local) freeze() error {
	if err := s.signal(syscall.SIGSTOP); err != nil {
		return err
	}
	for end := time.Now().Add(time.Minute); !s.stopped(); time.Sleep(time.Millisecond) { // until then it may answer
		if time.Now().After(end) {
			return errors.Join(errors.New("the API server does not stop"), s.thaw())
		}
	}
	return nil
}

func (s *local) thaw() error { return s.signal(syscall.SIGCONT) }

// signal is for the API server.
func (s *local) signal(sig syscall.Signal) error {
	return s.processes[len(s.processes)-1].Process.Signal(sig)
}

// start starts what was killed.
func (s *local) start() error {
	ended := s.processes
	s.processes = nil
	for _, p := range ended {
		if err := s.run(p.Args...); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	return s.ready(ctx)
}

// stopped reports whether all threads of the API server have stopped.
func (s *local) stopped() bool {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", s.processes[len(s.processes)-1].Process.Pid))
	for _, thread := range threads {
		stat, err := os.ReadFile(thread)
		if err != nil {
			return false
		}
		// The state comes after the name, which is in brackets.
		if at := bytes.LastIndexByte(stat, ')'); !bytes.HasPrefix(stat[at+1:], []byte(" T")) {
			return false
		}
	}
	return err == nil && len(threads) > 0
}

// Backup returns a function that makes the API server again what it is now, as one whose etcd is
// restored from a backup. Its clients find it gone for some seconds, both times.
func (s *Server) Backup(t testing.TB) (restore func()) {
	t.Helper()
	on, here := s.on.(*local)
	if !here {
		t.Fatal("the API server is of another machine, which cannot restore it")
	}
	data, backup := filepath.Join(on.dir, "etcd"), filepath.Join(on.dir, "etcd.backup")
	again := func(from, to string) {
		start := s.Kill(t)
		err := os.RemoveAll(to)
		if err == nil {
			err = os.CopyFS(to, os.DirFS(from))
		}
		if err == nil {
			// etcd wants its directory for itself.
			err = os.Chmod(data, 0o700)
		}
		if err != nil {
			t.Fatal(err)
		}
		start()
	}
	again(data, backup)
	return func() { again(backup, data) }
}

func (s *local) kill() error {
	for i := len(s.processes) - 1; i >= 0; i-- {
		_ = s.processes[i].Process.Kill() // it may be gone
		<-s.processes[i].exited
	}
	return nil
}

func (s *local) stop() {
	_ = s.kill()
	_ = os.RemoveAll(s.dir)
}
