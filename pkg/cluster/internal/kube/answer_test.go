package kube

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

type answers func(*http.Request) (*http.Response, error)

func (a answers) RoundTrip(q *http.Request) (*http.Response, error) { return a(q) }

// TestAnswering: an answer "not found" counts only if it has the content type of the API server's own answers. Any other one is ErrUnavailable.
func TestAnswering(t *testing.T) {
	for kind, says := range map[string]bool{"application/json": true, "application/vnd.kubernetes.protobuf": true, "text/plain; charset=utf-8": false, "text/html": false, "": false} {
		for _, code := range []int{http.StatusOK, http.StatusNotFound} {
			q, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://server/apis/ashlar.dev/v1alpha1/volumes/key", nil)
			if err != nil {
				t.Fatal(err)
			}
			answer, err := answering{answers(func(*http.Request) (*http.Response, error) {
				return &http.Response{StatusCode: code, Header: http.Header{"Content-Type": {kind}}, Body: io.NopCloser(strings.NewReader("404 page not found\n"))}, nil
			})}.RoundTrip(q)
			if err == nil {
				err = answer.Body.Close()
			}
			if wrong := code == http.StatusNotFound && !says; (err != nil) != wrong || wrong && (!errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), "404 page not found")) {
				t.Errorf("%d in %q: %v", code, kind, err)
			}
		}
	}
}
