// Package apitest gives tests a real Kubernetes API server, with the custom resources of deploy/kubernetes/crds and the rules of guard.yaml: etcd and
// kube-apiserver on loopback, in a directory that is removed with them. One serves all tests of a package, which calls Main in its TestMain. In a virtual
// machine it is one of the host (Serve).
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

// Admin is the user with all rights.
const Admin = "admin"

// Main runs the tests of a package, and ends the API server.
func Main(m *testing.M) {
	code := m.Run()
	Stop()
	os.Exit(code)
}

// Stop ends the API server, if a test has started it. It is for a TestMain that does not call Main.
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

// Get returns the API server. The first test that calls it starts it.
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

// Server is a running API server. It authorises by RBAC.
type Server struct {
	url    string
	on     place
	broken error // why it could not be started again

	agents struct {
		sync.Mutex
		tokens map[string]string // by the name of the node
	}
}

// place is the API server and its etcd, on this machine or another.
type place interface {
	freeze() error // returns when the API server does not answer any more
	thaw() error
	kill() error
	start() error   // after kill; returns when the API server answers
	backup() error  // between kill and start: keeps what etcd has
	restore() error // between kill and start: gives etcd what was kept last
	stop()          // ends both, and removes their files
}

// Config returns a configuration with a token. The token of Admin, and of each of users, is the name; for agents see Agent.
func (s *Server) Config(token string) *rest.Config { return configOf(s.url, token) }

func configOf(url, token string) *rest.Config {
	config := &rest.Config{Host: url, BearerToken: token, QPS: -1, TLSClientConfig: rest.TLSClientConfig{Insecure: true}}
	late(config, token)
	return config
}

// Kubeconfig writes a kubeconfig file for a configuration.
func (s *Server) Kubeconfig(as *rest.Config, path string) error {
	return s.KubeconfigIn(as, "", path)
}

// KubeconfigIn is Kubeconfig with the namespace of the context.
func (s *Server) KubeconfigIn(as *rest.Config, namespace, path string) error {
	config := api.NewConfig()
	config.Clusters["test"] = &api.Cluster{Server: as.Host, InsecureSkipTLSVerify: true}
	config.AuthInfos["test"] = &api.AuthInfo{Token: as.BearerToken}
	config.Contexts["test"] = &api.Context{Cluster: "test", AuthInfo: "test", Namespace: namespace}
	config.CurrentContext = "test"
	return clientcmd.WriteToFile(*config, path)
}

// users are those besides Admin. They have the rights of roles that tests bind to them.
var users = []string{"controller", "user"}

func root() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Join(filepath.Dir(file), "../..")
}

// binaries returns the directory of etcd and the API server: $ASHLAR_APISERVER, for machines that cannot build them, as virtual ones, or else that of
// hack/apiserver.sh, which builds them if need be.
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

// startTimeout is how long an API server may take to start.
const startTimeout = 5 * time.Minute

// Launch starts an API server with further flags. Tests use Get.
func Launch(flags ...string) (*Server, error) {
	if address, far := strings.CutPrefix(os.Getenv("ASHLAR_APISERVER"), farScheme); far {
		return launchFar(address, flags)
	}
	bin, err := binaries()
	if err != nil {
		return nil, err
	}
	for tries := 1; ; tries++ { // another program may take a port first
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
	on.etcd = "http://127.0.0.1:" + ports[0]
	on.url = "https://127.0.0.1:" + ports[2]
	if err := on.files(); err != nil {
		return nil, err
	}
	// etcd's timeout of a request is 5 s and two election timeouts, which a machine that stalls must not exceed. A start takes up to one election timeout.
	if err := on.run(filepath.Join(bin, "etcd"), "--data-dir="+on.dir+"/etcd", "--unsafe-no-fsync", "--log-level=warn", "--election-timeout=5000",
		"--listen-client-urls="+on.etcd, "--advertise-client-urls="+on.etcd, "--listen-peer-urls=http://127.0.0.1:"+ports[1]); err != nil {
		return nil, err
	}
	if err := on.run(append([]string{filepath.Join(bin, "kube-apiserver"), "--etcd-servers=" + on.etcd, "--bind-address=127.0.0.1",
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

// local is an API server in child processes of this one.
type local struct {
	dir, url  string
	etcd      string
	processes []*process // in the order of their start
}

// self returns the name of a user that no other server has.
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

// freePorts returns ports that nothing listens on now, and that the kernel does not choose by itself (ip_local_port_range, ip(7)), so that they are still free
// when a server is killed and started again.
func freePorts(n int) ([]string, error) {
	local, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		return nil, err
	}
	var given int // the first that the kernel chooses
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

// firstPort is the lowest port that is used; those of well-known services are below.
const firstPort = 10000

// process is a child process. It is killed when this process ends in any way.
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
		runtime.LockOSThread() // the signal is sent when the thread that started it ends
		defer close(p.exited)
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // it ends by being killed
		}
	}()
	if err := <-started; err != nil {
		return err
	}
	s.processes = append(s.processes, p)
	return nil
}

func (s *local) ready(ctx context.Context) error {
	client, err := rest.HTTPClientFor(configOf(s.url, s.self())) // it authenticates to this server alone: another one may have the port
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
			said, _ := io.ReadAll(response.Body) // for the error
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

// Freeze stops the API server from answering, as if the network were cut, until thaw is called or the test ends.
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

// Kill kills the API server and its etcd (SIGKILL). start starts them again; so does the end of the test.
func (s *Server) Kill(t testing.TB) (start func()) {
	t.Helper()
	if err := s.on.kill(); err != nil {
		t.Fatal(err)
	}
	start = sync.OnceFunc(func() {
		t.Helper()
		if s.broken = s.start(); s.broken != nil {
			t.Fatal(s.broken)
		}
	})
	t.Cleanup(start)
	return start
}

// Restart kills the API server and its etcd (SIGKILL), and starts them again. It returns when they answer.
func (s *Server) Restart() error { return errors.Join(s.on.kill(), s.start()) }

// start starts again what was killed. It returns when the policies of guard.yaml can be asked, if they were in force.
func (s *Server) start() error {
	if err := s.on.start(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	return s.configured(ctx)
}

// Stop ends the API server, and removes its files.
func (s *Server) Stop() { s.on.stop() }

// Etcd returns the URL of the API server's etcd, if both are processes of this machine.
func (s *Server) Etcd() string {
	if on, is := s.on.(*local); is {
		return on.etcd
	}
	return ""
}

func (s *local) freeze() error {
	if err := s.signal(syscall.SIGSTOP); err != nil {
		return err
	}
	for end := time.Now().Add(time.Minute); !s.stopped(); time.Sleep(time.Millisecond) { // until then it may still answer
		if time.Now().After(end) {
			return errors.Join(errors.New("the API server does not stop"), s.thaw())
		}
	}
	return nil
}

func (s *local) thaw() error { return s.signal(syscall.SIGCONT) }

// signal sends a signal to the API server.
func (s *local) signal(sig syscall.Signal) error {
	return s.processes[len(s.processes)-1].Process.Signal(sig)
}

// start starts again what was killed.
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

// stopped reports whether all threads of the API server are stopped.
func (s *local) stopped() bool {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", s.processes[len(s.processes)-1].Process.Pid))
	for _, thread := range threads {
		stat, err := os.ReadFile(thread)
		if err != nil {
			return false
		}
		// The state comes after the name in brackets (proc_pid_stat(5)).
		if at := bytes.LastIndexByte(stat, ')'); !bytes.HasPrefix(stat[at+1:], []byte(" T")) {
			return false
		}
	}
	return err == nil && len(threads) > 0
}

// Backup makes a backup of etcd. restore restores it, and with it the present state of the API server. Both restart the server: its clients do not reach it for
// some seconds.
func (s *Server) Backup(t testing.TB) (restore func()) {
	t.Helper()
	again := func(copies func() error) {
		t.Helper()
		start := s.Kill(t)
		if err := copies(); err != nil {
			t.Fatal(err)
		}
		start()
	}
	again(s.on.backup)
	return func() { again(s.on.restore) }
}

func (s *local) backup() error  { return s.copyData("etcd", "etcd.backup") }
func (s *local) restore() error { return s.copyData("etcd.backup", "etcd") }

func (s *local) copyData(from, to string) error {
	from, to = filepath.Join(s.dir, from), filepath.Join(s.dir, to)
	if err := os.RemoveAll(to); err != nil {
		return err
	}
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		return err
	}
	return os.Chmod(to, 0o700) // etcd requires this mode of its directory
}

func (s *local) kill() error {
	for i := len(s.processes) - 1; i >= 0; i-- {
		_ = s.processes[i].Process.Kill() // it may have ended
		<-s.processes[i].exited
	}
	return nil
}

func (s *local) stop() {
	_ = s.kill()
	_ = os.RemoveAll(s.dir)
}
