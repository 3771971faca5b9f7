// Package port is the one port of an agent, on which other parts of the driver call it: gRPC over TLS 1.3.
//
// Both sides identify each other without a certificate authority. An agent makes its key when it starts, keeps it in memory, and writes its fingerprint
// into the status of its pools, which nobody else may write (guard.yaml): callers accept no other key. A caller sends a token of its service account that
// is only for this agent, and the agent asks the API server whose token it is.
//
// docs/decisions/agents-port.md says why.
package port

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"math/big"
	"net"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Listener is the port of an agent, with the agent's key.
type Listener struct {
	net.Listener
	certificate tls.Certificate
}

// Listen opens a port, and makes its key. address is IP:PORT, at which other nodes reach it. ErrInvalid if it is no such address
// (CheckAddress).
func Listen(address string) (*Listener, error) {
	if err := CheckAddress(address); err != nil {
		return nil, err
	}
	certificate, err := newCertificate()
	if err != nil {
		return nil, fmt.Errorf("make a key: %w", err)
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", address, err)
	}
	return &Listener{listener, certificate}, nil
}

// CheckAddress returns ErrInvalid unless address is IP:PORT, with the IP address of one machine.
func CheckAddress(address string) error {
	host, _, err := net.SplitHostPort(address)
	if ip := net.ParseIP(host); err == nil && (ip == nil || ip.IsUnspecified()) {
		err = fmt.Errorf("%q is not the address of one machine", host)
	}
	if err != nil {
		return fmt.Errorf("%w: %q: give the IP address of this pod or node, at which others reach it, and a port, as 10.0.0.7:9812 or [fd00::7]:9812: %w", errdefs.ErrInvalid, address, err)
	}
	return nil
}

// Endpoint returns what callers have to know of the port; nil if l is nil.
func (l *Listener) Endpoint() *v1alpha1.AgentEndpoint {
	if l == nil {
		return nil
	}
	return &v1alpha1.AgentEndpoint{Address: l.Addr().String(), Fingerprint: fingerprint(l.certificate.Leaf)}
}

// Close closes the port, whether it is served or not. It does nothing if l is nil.
func (l *Listener) Close() {
	if l != nil {
		_ = l.Listener.Close() // it may be closed already
	}
}

// newCertificate makes a key, and a certificate for it. Callers look at the key alone, not at names and dates.
func newCertificate() (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Unix(0, 0), NotAfter: time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, err
	}
	leaf, err := x509.ParseCertificate(der)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, err
}

// fingerprint returns the SHA-256 of a certificate's key (its SubjectPublicKeyInfo, as in RFC 7469), in hex.
func fingerprint(c *x509.Certificate) string {
	sum := sha256.Sum256(c.RawSubjectPublicKeyInfo)
	return hex.EncodeToString(sum[:])
}

// only returns the TLS configuration of a caller that accepts one key, given by its fingerprint.
func only(want string) *tls.Config {
	return &tls.Config{
		MinVersion:         tls.VersionTLS13,
		InsecureSkipVerify: true, // no check of names and authorities: VerifyConnection checks the key
		VerifyConnection: func(state tls.ConnectionState) error {
			if have := fingerprint(state.PeerCertificates[0]); have != want {
				return fmt.Errorf("who answers has the key %s, and the agent %s", have, want)
			}
			return nil
		},
	}
}
