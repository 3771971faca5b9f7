// Package prometheus runs a real Prometheus (hack/install-tools.sh monitoring) for tests, and asks it.
package prometheus

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
)

// Server is a Prometheus that runs until its test ends.
type Server struct{ address string }

// Start starts the programs of a directory (bin) with a configuration, which promtool has to take. It listens at an address, and has all
// its files in dir.
func Start(t testing.TB, bin, dir, address, config string) *Server {
	t.Helper()
	path := filepath.Join(dir, "prometheus.yaml")
	check.OK(t, os.WriteFile(path, []byte(config), 0o600))
	if out, err := exec.Command(filepath.Join(bin, "promtool"), "check", "config", path).CombinedOutput(); err != nil {
		t.Fatalf("promtool check config: %v\n%s\n(hack/install-tools.sh monitoring brings it)", err, out)
	}
	log, err := os.Create(filepath.Join(dir, "prometheus.log"))
	check.OK(t, err)
	defer log.Close()
	run := exec.Command(filepath.Join(bin, "prometheus"), "--config.file="+path, "--storage.tsdb.path="+filepath.Join(dir, "tsdb"), "--web.listen-address="+address, "--log.level=warn")
	run.Stdout, run.Stderr = log, log
	run.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	check.OK(t, run.Start())
	t.Cleanup(func() {
		_ = run.Process.Kill()
		_ = run.Wait()
		if said, err := os.ReadFile(log.Name()); t.Failed() {
			t.Logf("Prometheus said: %s (%v)", said, err)
		}
	})
	return &Server{address}
}

// Get asks its API.
func (s *Server) Get(ctx context.Context, path string, values url.Values, to any) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.address+"/api/v1/"+path+"?"+values.Encode(), nil)
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	var answer struct {
		Status, Error string
		Data          json.RawMessage
	}
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		return err
	}
	if answer.Status != "success" {
		return fmt.Errorf("%s: %s", answer.Status, answer.Error)
	}
	return json.Unmarshal(answer.Data, to)
}

// Sample is a series at one moment.
type Sample struct {
	Metric map[string]string `json:"metric"`
	Value  [2]any            `json:"value"`
}

// Query is what an expression is now.
func (s *Server) Query(ctx context.Context, text string) ([]Sample, error) {
	var answer struct {
		Result []Sample `json:"result"`
	}
	err := s.Get(ctx, "query", url.Values{"query": {text}}, &answer)
	return answer.Result, err
}

// Eventually waits until an expression has a result.
func (s *Server) Eventually(t testing.TB, text string) {
	t.Helper()
	var err error
	for deadline := time.Now().Add(2 * time.Minute); time.Now().Before(deadline); time.Sleep(200 * time.Millisecond) {
		var found []Sample
		if found, err = s.Query(t.Context(), text); err == nil && len(found) > 0 {
			return
		}
	}
	t.Fatalf("there is never %s (%v)", text, err)
}

// Rule is an alerting rule, and how it is.
type Rule struct {
	Name, Health, LastError string
	State                   string // inactive, pending or firing
	Alerts                  []Alert
}

// Alert is one that is pending or firing.
type Alert struct {
	State               string
	Labels, Annotations map[string]string
}

// Rules are all that it has.
func (s *Server) Rules(ctx context.Context) ([]Rule, error) {
	var answer struct{ Groups []struct{ Rules []Rule } }
	if err := s.Get(ctx, "rules", nil, &answer); err != nil {
		return nil, err
	}
	var all []Rule
	for _, g := range answer.Groups {
		all = append(all, g.Rules...)
	}
	return all, nil
}
